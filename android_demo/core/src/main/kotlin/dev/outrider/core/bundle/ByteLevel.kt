package dev.outrider.core.bundle

import dev.outrider.core.protocol.REPLACEMENT

/** GPT-2's alphabet: a printable character for every byte, so that tokens are readable in tokenizer.json. */
internal object ByteLevel {
    private val chars: CharArray
    private val bytes = HashMap<Char, Byte>()

    init {
        val printable = ('!'.code..'~'.code) + (0xA1..0xAC) + (0xAE..0xFF)
        var spare = 0x100
        chars = CharArray(256) { if (it in printable) it.toChar() else (spare++).toChar() }
        for ((byte, char) in chars.withIndex()) bytes[char] = byte.toByte()
    }

    fun char(byte: Int): Char = chars[byte]

    /** Return the bytes of [text] in the alphabet. */
    fun written(text: String): String = text.toByteArray().map { chars[it.toInt() and 0xFF] }.joinToString("")

    /** Append the bytes that [token] stands for; its own UTF-8 if it has a character outside the alphabet. */
    fun bytes(token: String, out: ByteBuffer8) {
        val known = token.all(bytes::containsKey)
        if (known) token.forEach { out.add(bytes.getValue(it)) } else token.toByteArray().forEach(out::add)
    }
}

/** Bytes that grow at their end. */
internal class ByteBuffer8 {
    var array = ByteArray(64)
        private set
    var size = 0
        private set

    fun add(byte: Byte) {
        if (size == array.size) array = array.copyOf(2 * size)
        array[size++] = byte
    }
}

/**
 * Decode the first [size] of [bytes]. Every maximal incomplete part of a character becomes one U+FFFD, as Unicode
 * recommends; implemented here because Java and Android differ in this.
 */
internal fun decodeUtf8(bytes: ByteArray, size: Int): String = buildString {
    var at = 0
    while (at < size) {
        val first = bytes[at].toInt() and 0xFF
        val length = when (first) {
            in 0x00..0x7F -> 1
            in 0xC2..0xDF -> 2
            in 0xE0..0xEF -> 3
            in 0xF0..0xF4 -> 4
            else -> 0
        }
        var code = if (length < 2) first else first and (0xFF shr (length + 1))
        var read = 1
        while (read < length && at + read < size) {
            val byte = bytes[at + read].toInt() and 0xFF
            if (byte !in if (read == 1) second(first) else 0x80..0xBF) break
            code = code shl 6 or (byte and 0x3F)
            read++
        }
        if (length > 0 && read == length) appendCodePoint(code) else append(REPLACEMENT)
        at += read
    }
}

/** Valid second bytes: no overlong forms, no surrogates, nothing above U+10FFFF. */
private fun second(first: Int) = when (first) {
    0xE0 -> 0xA0..0xBF
    0xED -> 0x80..0x9F
    0xF0 -> 0x90..0xBF
    0xF4 -> 0x80..0x8F
    else -> 0x80..0xBF
}
