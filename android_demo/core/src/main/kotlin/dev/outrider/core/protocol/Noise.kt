/**
 * Keyed Gumbel noise, specified bit for bit, so that every port and replica draws the same token.
 *
 * Arithmetic is modulo 2^32; `fmix32` is MurmurHash3's finaliser. [Int] wraps as the specification wants it.
 *
 *     k = fmix32(seed_low + 0x9E3779B9)
 *     k = fmix32(k ^ seed_high)
 *     k = fmix32(k ^ fmix32(position + 0x7F4A7C15))
 *     h = fmix32(k ^ fmix32(token + 0x9E3779B9))
 *     u = (h + 0.5) / 2^32            never 0 or 1
 *     g = -ln(-ln(u))
 */
package dev.outrider.core.protocol

import kotlin.math.ln

private const val GOLDEN = 0x9E3779B9.toInt()

/** MurmurHash3's 32-bit finaliser. */
internal fun fmix32(value: Int): Int {
    var h = value
    h = (h xor (h ushr 16)) * 0x85EBCA6B.toInt()
    h = (h xor (h ushr 13)) * 0xC2B2AE35.toInt()
    return h xor (h ushr 16)
}

/** The noise of one [position], the absolute index of the token being drawn, under a [seed] of 63 bits. */
internal class Noise(seed: Long, position: Int) {
    private val key: Int

    init {
        var k = fmix32(seed.toInt() + GOLDEN)
        k = fmix32(k xor (seed ushr 32).toInt())
        key = fmix32(k xor fmix32(position + 0x7F4A7C15))
    }

    /** `h` of the specification, 32 bits without a sign. */
    fun hash(token: Int): Int = fmix32(key xor fmix32(token + GOLDEN))

    /** Standard Gumbel noise of [token]. */
    fun gumbel(token: Int): Double {
        val h = hash(token).toLong() and 0xFFFFFFFFL
        return -ln(-ln((h + 0.5) / 4294967296.0))
    }
}
