package dev.outrider.core

import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.double
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.hexToBytes
import dev.outrider.core.bundle.int
import dev.outrider.core.bundle.toHex
import dev.outrider.core.protocol.Cancel
import dev.outrider.core.protocol.Close
import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.Error
import dev.outrider.core.protocol.Features
import dev.outrider.core.protocol.Generate
import dev.outrider.core.protocol.Hello
import dev.outrider.core.protocol.Message
import dev.outrider.core.protocol.Open
import dev.outrider.core.protocol.Opened
import dev.outrider.core.protocol.Resync
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.Verdict
import dev.outrider.core.protocol.Verify
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.packIds
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder

/** The files of outrider_core/protocol/vectors, and the JSON forms that they use. */
internal object Vectors {
    /** The bundle that `make` writes. */
    val bundle = File(System.getProperty("bundle"))

    /** The vectors of file [name].json. */
    fun read(name: String): List<Any?> =
        Json.parse(File(System.getProperty("vectors"), "$name.json").readText()) as List<*>

    fun sampling(fields: Any?) = Sampling(
        fields.double("temperature"), fields.field("top_k"), fields.double("top_p"), fields.double("min_p"),
        fields.field("seed"),
    )

    fun constraint(fields: Any?): Constraint {
        val ids = ByteBuffer.wrap(bytes(fields, "bias_tokens")).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer()
        val amounts = ByteBuffer.wrap(bytes(fields, "biases")).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
        return Constraint(
            fields.int("begin"), fields.double("frequency_penalty"), fields.double("presence_penalty"),
            (0 until ids.limit()).associate { ids[it] to amounts[it] }, fields.int("grammar"), fields.field("schema"),
        )
    }

    /** The inverse of [constraint]. */
    private fun constraintFields(of: Constraint): Map<String, Any> {
        val amounts = ByteBuffer.allocate(4 * of.biases.size).order(ByteOrder.LITTLE_ENDIAN)
        of.biases.values.forEach(amounts::putFloat)
        return mapOf(
            "begin" to of.begin, "frequency_penalty" to of.frequencyPenalty, "presence_penalty" to of.presencePenalty,
            "bias_tokens" to hex(packIds(of.biases.keys.toList())), "biases" to hex(amounts.array()),
            "grammar" to of.grammar, "schema" to of.schema,
        )
    }

    fun bytes(fields: Any?, name: String): ByteArray = fields.field<Any>(name).field<String>("hex").hexToBytes()

    /** Make a message from its fields. */
    fun message(f: Any?): Message {
        fun stream() = f.int("stream")
        fun seq() = f.field<Long>("seq")
        fun baseLen() = f.int("base_len")
        return when (val type = f.field<String>("type")) {
            "Hello" -> Hello(
                f.int("protocol"), f.field("target_hash"), f.field("drafter_hash"), f.field("client"), arithmetic(f),
            )
            "Welcome" -> Welcome(
                f.field("protocol"), f.field("target_hash"), f.field("drafter_hash"), f.int("vocab_size"),
                f.int("max_context"), f.int("max_nodes"), f.int("tree_budget"), f.field("server"), bytes(f, "costs"),
                later(f, "constraints"), arithmetic(f), later(f, "stream_tokens"), later(f, "queue_us"),
            )
            "Open" -> Open(
                stream(), bytes(f, "session"), seq(), bytes(f, "tokens"), f.int("features_have"),
                sampling(f.field<Any>("sampling")), (f as Map<*, *>)["constraint"]?.let(::constraint),
            )
            "Opened" -> Opened(stream(), f.int("committed"), f.int("cached"))
            "Features" -> Features(stream(), f.int("start"), bytes(f, "rows"))
            "Verify" -> Verify(stream(), seq(), baseLen(), bytes(f, "tokens"), bytes(f, "parents"))
            "Verdict" -> Verdict(
                stream(), seq(), baseLen(), bytes(f, "accepted"), f.int("bonus"), f.int("finish"), bytes(f, "rows"),
                f.int("tree_budget"), f.int("queue_us"), f.int("engine_us"),
            )
            "Resync" -> Resync(stream(), f.int("committed"))
            "Generate" -> Generate(stream(), seq(), baseLen(), f.int("max_new"), f.field("rows"))
            "Cancel" -> Cancel(stream())
            "Close" -> Close(stream())
            "Error" -> Error(f.int("code"), f.field("text"), stream(), f.int("retry_after_ms"))
            else -> error("no message $type")
        }
    }

    /** The inverse of [message]. */
    fun fields(m: Message): Map<String, Any?> = mapOf("type" to m::class.simpleName) + when (m) {
        is Hello -> mapOf(
            "protocol" to m.protocol, "target_hash" to m.targetHash, "drafter_hash" to m.drafterHash,
            "client" to m.client,
        ) + told(m.arithmetic)
        is Welcome -> mapOf(
            "protocol" to m.protocol, "target_hash" to m.targetHash, "drafter_hash" to m.drafterHash,
            "vocab_size" to m.vocabSize, "max_context" to m.maxContext, "max_nodes" to m.maxNodes,
            "tree_budget" to m.treeBudget, "server" to m.server, "costs" to hex(m.costs),
        ) + told(m.arithmetic) +
            mapOf("constraints" to m.constraints, "stream_tokens" to m.streamTokens, "queue_us" to m.queueUs)
                .filterValues { it != 0 }
        is Open -> mapOf(
            "stream" to m.stream, "session" to hex(m.session), "seq" to m.seq, "tokens" to hex(m.tokens),
            "features_have" to m.featuresHave,
            "sampling" to with(m.sampling) {
                mapOf("temperature" to temperature, "top_k" to topK, "top_p" to topP, "min_p" to minP, "seed" to seed)
            },
        ) + (m.constraint?.let { mapOf("constraint" to constraintFields(it)) } ?: emptyMap())
        is Opened -> mapOf("stream" to m.stream, "committed" to m.committed, "cached" to m.cached)
        is Features -> mapOf("stream" to m.stream, "start" to m.start, "rows" to hex(m.rows))
        is Verify -> mapOf(
            "stream" to m.stream, "seq" to m.seq, "base_len" to m.baseLen, "tokens" to hex(m.tokens),
            "parents" to hex(m.parents),
        )
        is Verdict -> mapOf(
            "stream" to m.stream, "seq" to m.seq, "base_len" to m.baseLen, "accepted" to hex(m.accepted),
            "bonus" to m.bonus, "finish" to m.finish, "rows" to hex(m.rows), "tree_budget" to m.treeBudget,
            "queue_us" to m.queueUs, "engine_us" to m.engineUs,
        )
        is Resync -> mapOf("stream" to m.stream, "committed" to m.committed)
        is Generate -> mapOf(
            "stream" to m.stream, "seq" to m.seq, "base_len" to m.baseLen, "max_new" to m.maxNew, "rows" to m.rows,
        )
        is Cancel -> mapOf("stream" to m.stream)
        is Close -> mapOf("stream" to m.stream)
        is Error -> mapOf(
            "code" to m.code, "text" to m.text, "stream" to m.stream, "retry_after_ms" to m.retryAfterMs,
        )
    }

    private fun later(fields: Any?, name: String): Int = ((fields as Map<*, *>)[name] as Long? ?: 0).toInt()

    private fun arithmetic(fields: Any?): String = (fields as Map<*, *>)["arithmetic"] as String? ?: ""

    private fun told(arithmetic: String) =
        if (arithmetic.isEmpty()) emptyMap() else mapOf("arithmetic" to arithmetic)

    /** Compare JSON values: numbers by value, fractions to a millionth. */
    fun same(one: Any?, other: Any?): Boolean = when {
        one is Number && other is Number ->
            if (one is Double || other is Double) Math.abs(one.toDouble() - other.toDouble()) <= 1e-6
            else one.toLong() == other.toLong()
        one is List<*> && other is List<*> -> one.size == other.size && one.zip(other).all { (a, b) -> same(a, b) }
        one is Map<*, *> && other is Map<*, *> -> one.keys == other.keys && one.keys.all { same(one[it], other[it]) }
        else -> one == other
    }

    private fun hex(bytes: ByteArray) = mapOf("hex" to bytes.toHex())
}
