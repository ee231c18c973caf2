package dev.outrider.core.protocol

import java.nio.BufferUnderflowException
import java.nio.ByteBuffer
import java.nio.charset.CharacterCodingException

/** Writes the MessagePack values of messages, each in its shortest form. */
internal class PackWriter {
    private var buffer = ByteBuffer.allocate(256)

    fun bytes(): ByteArray = buffer.array().copyOf(buffer.position())

    fun array(size: Int) {
        if (size < 16) byte(0x90 or size) else { byte(0xDC); room(2).putShort(size.toShort()) }
    }

    /** [Int], [Long], [Boolean], [Double], [String], [ByteArray], null or a [List] of these. */
    fun value(value: Any?) {
        when (value) {
            null -> byte(0xC0)
            is Int -> integer(value.toLong())
            is Long -> integer(value)
            is Boolean -> byte(if (value) 0xC3 else 0xC2)
            is Double -> { byte(0xCB); room(8).putDouble(value) }
            is String -> {
                val text = value.toByteArray()
                when {
                    text.size < 32 -> byte(0xA0 or text.size)
                    else -> sized(text.size, 0xD9)
                }
                room(text.size).put(text)
            }
            is ByteArray -> { sized(value.size, 0xC4); room(value.size).put(value) }
            is List<*> -> { array(value.size); value.forEach { value(it) } }
            else -> throw IllegalArgumentException("no MessagePack form for ${value::class}")
        }
    }

    private fun integer(value: Long) {
        when {
            value in -32..127 -> byte(value.toInt())
            value < 0 && value >= Byte.MIN_VALUE -> { byte(0xD0); byte(value.toInt()) }
            value < 0 && value >= Short.MIN_VALUE -> { byte(0xD1); room(2).putShort(value.toShort()) }
            value < 0 && value >= Int.MIN_VALUE -> { byte(0xD2); room(4).putInt(value.toInt()) }
            value < 0 -> { byte(0xD3); room(8).putLong(value) }
            value <= 0xFF -> { byte(0xCC); byte(value.toInt()) }
            value <= 0xFFFF -> { byte(0xCD); room(2).putShort(value.toShort()) }
            value <= 0xFFFFFFFFL -> { byte(0xCE); room(4).putInt(value.toInt()) }
            else -> { byte(0xCF); room(8).putLong(value) }
        }
    }

    /** Write a length in one, two or four bytes after [mark], [mark] + 1 or [mark] + 2. */
    private fun sized(size: Int, mark: Int) {
        when {
            size <= 0xFF -> { byte(mark); byte(size) }
            size <= 0xFFFF -> { byte(mark + 1); room(2).putShort(size.toShort()) }
            else -> { byte(mark + 2); room(4).putInt(size) }
        }
    }

    private fun byte(value: Int) {
        room(1).put(value.toByte())
    }

    private fun room(size: Int): ByteBuffer {
        if (buffer.remaining() < size) {
            val larger = ByteBuffer.allocate(2 * buffer.capacity() + size)
            larger.put(buffer.array(), 0, buffer.position())
            buffer = larger
        }
        return buffer
    }
}

/** Reads one MessagePack value after another. Raises [WireError] on any other value than the requested one. */
internal class PackReader(data: ByteArray) {
    private val buffer = ByteBuffer.wrap(data)

    val atEnd: Boolean get() = !buffer.hasRemaining()

    fun array(): Int = when (val mark = unsigned8()) {
        in 0x90..0x9F -> mark and 0x0F
        0xDC -> unsigned16()
        0xDD -> size32()
        else -> throw WireError("no array where one must be")
    }

    fun integer(): Long = reading {
        when (val mark = unsigned8()) {
            in 0x00..0x7F -> mark.toLong()
            in 0xE0..0xFF -> mark.toLong() - 256
            0xCC -> unsigned8().toLong()
            0xCD -> unsigned16().toLong()
            0xCE -> buffer.int.toLong() and 0xFFFFFFFFL
            0xCF -> buffer.long.also { if (it < 0) throw WireError("a number is above 2^63-1") }
            0xD0 -> buffer.get().toLong()
            0xD1 -> buffer.short.toLong()
            0xD2 -> buffer.int.toLong()
            0xD3 -> buffer.long
            else -> throw WireError("no integer where one must be")
        }
    }

    fun double(): Double {
        if (unsigned8() != 0xCB) throw WireError("no number where one must be")
        return reading { buffer.double }
    }

    fun text(): String {
        val size = when (val mark = unsigned8()) {
            in 0xA0..0xBF -> mark and 0x1F
            0xD9 -> unsigned8()
            0xDA -> unsigned16()
            0xDB -> size32()
            else -> throw WireError("no text where some must be")
        }
        val bytes = ByteBuffer.wrap(take(size))
        return try {
            Charsets.UTF_8.newDecoder().decode(bytes).toString()
        } catch (_: CharacterCodingException) {
            throw WireError("text that is not UTF-8")
        }
    }

    fun binary(): ByteArray = take(
        when (unsigned8()) {
            0xC4 -> unsigned8()
            0xC5 -> unsigned16()
            0xC6 -> size32()
            else -> throw WireError("no bytes where some must be")
        },
    )

    /** Skip one value of any kind, however deeply nested. */
    fun skip() {
        var left = 1L
        while (left > 0) {
            left--
            when (val mark = unsigned8()) {
                in 0x00..0x7F, in 0xE0..0xFF, 0xC0, 0xC2, 0xC3 -> Unit
                in 0x80..0x8F -> left += 2 * (mark and 0x0F)
                in 0x90..0x9F -> left += mark and 0x0F
                in 0xA0..0xBF -> take(mark and 0x1F)
                0xC4, 0xD9 -> take(unsigned8())
                0xC5, 0xDA -> take(unsigned16())
                0xC6, 0xDB -> take(size32())
                0xC7 -> take(unsigned8() + 1)
                0xC8 -> take(unsigned16() + 1)
                0xC9 -> { val size = size32(); take(1); take(size) }
                0xCC, 0xD0 -> take(1)
                0xCD, 0xD1 -> take(2)
                0xCA, 0xCE, 0xD2 -> take(4)
                0xCB, 0xCF, 0xD3 -> take(8)
                in 0xD4..0xD8 -> take(1 + (1 shl (mark - 0xD4)))
                0xDC -> left += unsigned16()
                0xDD -> left += size32()
                0xDE -> left += 2 * unsigned16()
                0xDF -> left += 2L * size32()
                else -> throw WireError("a byte that begins no value")
            }
        }
    }

    private fun unsigned8(): Int = reading { buffer.get().toInt() and 0xFF }

    private fun unsigned16(): Int = reading { buffer.short.toInt() and 0xFFFF }

    private fun size32(): Int = reading { buffer.int }.also { if (it < 0) throw WireError("a length above 2^31-1") }

    private fun take(size: Int): ByteArray {
        if (size > buffer.remaining()) throw WireError("a frame that ends too soon")
        return ByteArray(size).also { buffer.get(it) }
    }

    private inline fun <T> reading(read: () -> T): T = try {
        read()
    } catch (_: BufferUnderflowException) {
        throw WireError("a frame that ends too soon")
    }
}
