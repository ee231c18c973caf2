/**
 * Frames of `outrider.v1`: binary WebSocket messages.
 *
 * A message is a MessagePack array `[type, fields...]`; vectors are one little-endian `bin`. Fields are only ever
 * appended, with defaults; type numbers are never reused. A frame is the message, one byte 0x80, then zeros up to the
 * next size bucket (ISO/IEC 7816-4 padding), so that frame sizes do not fingerprint prompts.
 *
 *     device                                verifier
 *     HELLO  ------------------------------>
 *            <------------------------------ WELCOME | ERROR (hashes or arithmetic differ)
 *     OPEN (token ids, rows it has) -------->
 *            <------------------------------ OPENED, then FEATURES... (rows the device lacks)
 *     VERIFY seq (tree) -------------------->
 *            <------------------------------ VERDICT seq (path, bonus token, rows) | RESYNC | ERROR
 *     CLOSE -------------------------------->
 *
 * One session lives on one `stream`, a small number that the client picks per connection. The device may send VERIFY
 * right after OPEN. A VERIFY repeated with the same seq gets the same bytes back.
 */
package dev.outrider.core.protocol

import java.nio.ByteBuffer
import java.nio.ByteOrder

internal const val SUBPROTOCOL = "outrider.v1"
internal const val PROTOCOL_VERSION = 1

/** Largest frame that the device accepts, in bytes. */
internal const val MAX_SERVER_FRAME = 1 shl 20

/** Streams of one connection. */
internal const val STREAMS = 1 shl 16

/** Tokens of a step are fewer, in hundredths. */
private const val MOST_STREAM_TOKENS = 10_000

private const val PADDING_MARK = 0x80.toByte()

/** A frame that cannot be understood: truncated, out of range, wrong type, broken padding. */
internal class WireError(message: String) : Exception(message)

/** Return the frame size that [size] bytes are padded to: steps of 64 up to 1 KiB, then of 512. */
internal fun bucket(size: Int): Int {
    val step = if (size <= 1024) 64 else 512
    return (size + step - 1) / step * step
}

/** A padded frame. */
internal fun encode(message: Message): ByteArray {
    val fields = fieldsOf(message)
    val writer = PackWriter()
    writer.array(1 + fields.size)
    writer.value(message.type)
    fields.forEach(writer::value)
    val data = writer.bytes()
    return data.copyOf(bucket(data.size + 1)).also { it[data.size] = PADDING_MARK }
}

private fun fieldsOf(message: Message): List<Any?> = when (message) {
    is Hello -> with(message) { listOf(protocol, targetHash, drafterHash, client, arithmetic) }
    is Welcome -> with(message) {
        listOf(
            protocol, targetHash, drafterHash, vocabSize, maxContext, maxNodes, treeBudget, server, costs, constraints,
            arithmetic, streamTokens, queueUs,
        )
    }
    is Open -> with(message) {
        listOf(stream, session, seq, tokens, featuresHave, fieldsOf(sampling), constraint?.let(::fieldsOf))
    }
    is Opened -> listOf(message.stream, message.committed, message.cached)
    is Features -> listOf(message.stream, message.start, message.rows)
    is Verify -> with(message) { listOf(stream, seq, baseLen, tokens, parents) }
    is Verdict -> with(message) {
        listOf(stream, seq, baseLen, accepted, bonus, finish, rows, treeBudget, queueUs, engineUs)
    }
    is Resync -> listOf(message.stream, message.committed)
    is Generate -> with(message) { listOf(stream, seq, baseLen, maxNew, rows) }
    is Cancel -> listOf(message.stream)
    is Close -> listOf(message.stream)
    is Error -> with(message) { listOf(code, text, stream, retryAfterMs) }
}

private fun fieldsOf(sampling: Sampling): List<Any> =
    with(sampling) { listOf(temperature, topK, topP, minP, seed) }

/** Return a constraint's bytes in a record; [unpackConstraint] reads them. */
internal fun packConstraint(constraint: Constraint): ByteArray =
    PackWriter().apply { value(fieldsOf(constraint)) }.bytes()

/** The inverse of [packConstraint]. Raises [IllegalArgumentException] on anything else. */
internal fun unpackConstraint(bytes: ByteArray): Constraint = try {
    with(PackReader(bytes)) {
        require(array() == 7) { "its constraint has other fields" }
        val begin = integer()
        val penalties = listOf(double(), double())
        val ids = ByteBuffer.wrap(binary()).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer()
        val amounts = ByteBuffer.wrap(binary()).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
        require(begin in 0..Int.MAX_VALUE && ids.limit() == amounts.limit()) { "its constraint is damaged" }
        val biases = (0 until ids.limit()).associate { ids[it] to amounts[it] }
        Constraint(begin.toInt(), penalties[0], penalties[1], biases, integer().toInt(), text())
    }
} catch (error: WireError) {
    throw IllegalArgumentException("its constraint is damaged: ${error.message}")
}

private fun fieldsOf(constraint: Constraint): List<Any> = with(constraint) {
    val amounts = ByteBuffer.allocate(4 * biases.size).order(ByteOrder.LITTLE_ENDIAN)
    biases.values.forEach(amounts::putFloat)
    listOf(begin, frequencyPenalty, presencePenalty, packIds(biases.keys.toList()), amounts.array(), grammar, schema)
}

/** Decode a verifier's message. Raises [WireError] and nothing else, whatever the bytes. */
internal fun decodeServer(frame: ByteArray): ServerMessage {
    val end = frame.indexOfLast { it != 0.toByte() }
    if (end < 0 || frame[end] != PADDING_MARK) throw WireError("frame without padding mark")
    val fields = Fields(PackReader(frame.copyOf(end)))
    return with(fields) {
        val message = when (val type = reader.integer()) {
            2L -> Welcome(
                integer(), text(64), text(64), count(), count(), count(), count(), optional("") { text(128) },
                optional(EMPTY) { binary(8 * MAX_POINTS) }, optional(0) { count() }, optional("") { arithmetic() },
                optional(0) { small(0 until MOST_STREAM_TOKENS) }, optional(0) { count() },
            )
            4L -> Opened(stream(), count(), count())
            5L -> Features(stream(), count(), binary())
            7L -> Verdict(
                stream(), integer(0 until (1L shl 32)), count(), binary(MAX_NODES), count(), small(0..15), binary(),
                optional(0) { count() }, optional(0) { count() }, optional(0) { count() },
            )
            8L -> Resync(stream(), count())
            12L -> Error(
                small(0..255), text(512), optional(-1) { small(-1 until STREAMS) }, optional(0) { count() },
            )
            else -> throw WireError("no verifier's message has type $type")
        }
        end()
        message
    }
}

/** A message's fields, one after another. Later versions may append unknown fields. */
private class Fields(val reader: PackReader) {
    private var left = reader.array() - 1

    fun <T> optional(default: T, read: () -> T): T = if (left > 0) read() else default

    fun integer(range: LongRange = Long.MIN_VALUE..Long.MAX_VALUE): Long =
        next { integer() }.also { if (it !in range) throw WireError("$it is not in $range") }

    fun small(range: IntRange): Int = integer(range.first.toLong()..range.last.toLong()).toInt()

    fun count(): Int = small(0..Int.MAX_VALUE)

    fun stream(): Int = small(0 until STREAMS)

    fun text(longest: Int): String = next { text() }.also {
        if (it.codePointCount(0, it.length) > longest) throw WireError("text of more than $longest characters")
    }

    fun arithmetic(): String = next { text() }.also {
        if (!isArithmetic(it)) throw WireError("the arithmetic is not at most 64 printable characters")
    }

    fun binary(longest: Int = MAX_SERVER_FRAME): ByteArray = next { binary() }.also {
        if (it.size > longest) throw WireError("more than $longest bytes")
    }

    fun end() {
        while (left > 0) next { skip() }
        if (!reader.atEnd) throw WireError("bytes behind the message")
    }

    private inline fun <T> next(read: PackReader.() -> T): T {
        if (left-- < 1) throw WireError("a field is missing")
        return reader.read()
    }
}

/** Token ids as uint32, little-endian. */
internal fun packIds(ids: List<Int>): ByteArray {
    val buffer = ByteBuffer.allocate(4 * ids.size).order(ByteOrder.LITTLE_ENDIAN)
    ids.forEach(buffer::putInt)
    return buffer.array()
}

/** A tree's parents as VERIFY carries them. */
internal fun packParents(tree: TokenTree): ByteArray = ByteArray(tree.size) { tree.parents[it].toByte() }
