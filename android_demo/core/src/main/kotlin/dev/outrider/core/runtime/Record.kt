package dev.outrider.core.runtime

import dev.outrider.core.protocol.STREAMS
import dev.outrider.core.protocol.Sampling

/**
 * What it takes to go on with an answer, perhaps in another process: [toJson] now, [parse] then.
 *
 * prompt, committed, provisional: token ids; adopted: spans of prompt and committed text that stayed unverified; seq,
 * stream, session (16 bytes): as on the wire; target: the hash of the target that answers; stop: strings that end the
 * answer. The JSON is the same as that of the Python runtime.
 */
class AnswerRecord(
    val prompt: List<Int>,
    val committed: List<Int>,
    val provisional: List<Int>,
    val adopted: List<Pair<Int, Int>>,
    val sampling: Sampling,
    val maxNew: Int,
    val seq: Long,
    val stream: Int,
    val session: ByteArray,
    val target: String,
    val stop: List<String>,
) {
    fun toJson(): String = Json.write(
        mapOf(
            "version" to 1, "prompt" to prompt, "committed" to committed, "provisional" to provisional,
            "adopted" to adopted.map { listOf(it.first, it.second) },
            "sampling" to with(sampling) {
                mapOf("temperature" to temperature, "top_k" to topK, "top_p" to topP, "min_p" to minP, "seed" to seed)
            },
            "max_new" to maxNew, "seq" to seq, "stream" to stream, "session" to session.toHex(), "target" to target,
            "stop" to stop,
        ),
    )

    companion object {
        /** The inverse of [toJson]. Raises [IllegalArgumentException] on anything else. */
        fun parse(json: String): AnswerRecord {
            val fields = Json.parse(json)
            require(fields.int("version") == 1) { "a record of another version" }
            val sampling = fields.field<Map<*, *>>("sampling")
            val record = AnswerRecord(
                fields.ints("prompt"), fields.ints("committed"), fields.ints("provisional"),
                fields.field<List<*>>("adopted").map(::span),
                Sampling(
                    sampling.double("temperature"), sampling.field("top_k"), sampling.double("top_p"),
                    sampling.double("min_p"), sampling.field("seed"),
                ),
                fields.int("max_new"), fields.field("seq"), fields.int("stream"),
                fields.field<String>("session").hexToBytes(), fields.field("target"), fields.strings("stop"),
            )
            require(record.prompt.isNotEmpty() && record.session.size == 16 && record.stream in 0 until STREAMS) {
                "not a record of an answer"
            }
            return record
        }

        private fun span(value: Any?): Pair<Int, Int> {
            val (first, last) = mapOf("span" to value).ints("span").also { require(it.size == 2) { "not a span" } }
            return first to last
        }
    }
}

internal fun ByteArray.toHex(): String = joinToString("") { (it.toInt() and 0xFF).toString(16).padStart(2, '0') }

/** Raises [IllegalArgumentException] on what is not hexadecimal. */
internal fun String.hexToBytes(): ByteArray {
    require(length % 2 == 0) { "half a byte" }
    return ByteArray(length / 2) { substring(2 * it, 2 * it + 2).toInt(16).toByte() }
}
