package dev.outrider.core.session

import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.double
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.hexToBytes
import dev.outrider.core.bundle.int
import dev.outrider.core.bundle.ints
import dev.outrider.core.bundle.strings
import dev.outrider.core.bundle.toHex
import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.STREAMS
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.isArithmetic
import dev.outrider.core.protocol.packConstraint
import dev.outrider.core.protocol.unpackConstraint

private const val VERSION = 1

/**
 * The data to continue an answer, perhaps in another process: saved with [toJson], read with [parse].
 *
 * prompt, committed, provisional: token ids; writers: who wrote which of the answer's tokens, provisional ones
 * included; seq, stream, session (16 bytes): as on the wire; target: the hash of the target that answers; stop: strings
 * that end the answer; arithmetic: of the verified tokens, "" if unknown; constraint: the answer's. The Python runtime
 * writes the same JSON.
 *
 * Raises [IllegalArgumentException] if [writers] are not the answer's.
 */
public class AnswerRecord internal constructor(
    public val prompt: List<Int>,
    public val committed: List<Int>,
    public val provisional: List<Int>,
    public val writers: List<Span>,
    internal val sampling: Sampling,
    internal val maxNew: Int,
    internal val seq: Long,
    internal val stream: Int,
    internal val session: ByteArray,
    internal val target: String,
    internal val stop: List<String>,
    internal val arithmetic: String = "",
    internal val constraint: Constraint? = null,
) {
    init {
        val ends = listOf(0) + writers.map { it.end }
        require(ends.last() == committed.size + provisional.size && writers.map { it.begin } == ends.dropLast(1)) {
            "it does not name the writer of every token"
        }
        require(isArithmetic(arithmetic)) { "its arithmetic is not at most 64 printable characters" }
    }

    /** Return the JSON, which the Python runtime reads too. */
    public fun toJson(): String = Json.write(
        mapOf(
            "version" to VERSION, "prompt" to prompt, "committed" to committed, "provisional" to provisional,
            "writers" to writers.map { listOf(it.begin, it.end, it.writer.name.lowercase()) },
            "sampling" to with(sampling) {
                mapOf("temperature" to temperature, "top_k" to topK, "top_p" to topP, "min_p" to minP, "seed" to seed)
            },
            "max_new" to maxNew, "seq" to seq, "stream" to stream, "session" to session.toHex(), "target" to target,
            "stop" to stop, "constraint" to constraint?.let { packConstraint(it).toHex() }.orEmpty(),
            "arithmetic" to arithmetic,
        ),
    )

    public companion object {
        /** The inverse of [toJson]. Raises [IllegalArgumentException] on anything else. */
        public fun parse(json: String): AnswerRecord {
            val fields = Json.parse(json)
            val version = fields.int("version")
            require(version == VERSION) { "the record has version $version; this program reads version $VERSION" }
            val constraint = fields.field<String>("constraint")
            val sampling = fields.field<Map<*, *>>("sampling")
            val record = AnswerRecord(
                fields.ints("prompt"), fields.ints("committed"), fields.ints("provisional"),
                fields.field<List<*>>("writers").map(::span),
                Sampling(
                    sampling.double("temperature"), sampling.field("top_k"), sampling.double("top_p"),
                    sampling.double("min_p"), sampling.field("seed"),
                ),
                fields.int("max_new"), fields.field("seq"), fields.int("stream"),
                fields.field<String>("session").hexToBytes(), fields.field("target"), fields.strings("stop"),
                fields.field("arithmetic"),
                if (constraint.isEmpty()) null else unpackConstraint(constraint.hexToBytes()),
            )
            require(record.prompt.isNotEmpty() && record.session.size == 16 && record.stream in 0 until STREAMS) {
                "not a record of an answer"
            }
            return record
        }

        private fun span(value: Any?): Span {
            require(value is List<*> && value.size == 3) { "not a span" }
            val (begin, end) = mapOf("span" to value.take(2)).ints("span")
            val writer = Writer.values().firstOrNull { it.name.lowercase() == value[2] }
            return Span(begin, end, requireNotNull(writer) { "${value[2]} writes nothing" })
        }
    }
}

/** Return the data that [restore] needs. target: the bundle's hash; stop: the strings that end the answer. */
internal fun recordOf(session: Session, target: String, stop: List<String>) = AnswerRecord(
    session.prompt, session.committed.drop(session.prompt.size), session.provisional, session.text.spans,
    session.sampling, session.maxNew, session.verifier.seq, session.stream, session.sessionId, target, stop,
    session.verifier.pinned, session.constraint,
)

/** Restore a recorded answer in a session with its prompt and settings, which must not have started. */
internal fun restore(session: Session, record: AnswerRecord) {
    session.text.restore(record)
    session.verifier.seq = record.seq
    session.verifier.pinned = record.arithmetic
}
