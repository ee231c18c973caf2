package dev.outrider.core.protocol

import java.nio.ByteBuffer
import java.nio.ByteOrder

/** The shape of a feature row. heads: the drafter's cross-attention KV heads; headDim: values per head. */
internal data class RowShape(val heads: Int, val headDim: Int) {
    /** Bytes of one head's values, two per byte. */
    val width: Int get() = (headDim + 1) / 2

    /** Bytes of one packed row. */
    val bytes: Int get() = 2 * heads * (2 + width)

    /** Values of one row: K and V of every head. */
    val values: Int get() = 2 * heads * headDim
}

/**
 * Feature rows from the wire: 4 bits a value, with one float16 scale per (token, K|V, head).
 *
 * A block of n rows is the scales `[n, 2, heads]` float16, then the values `[n, 2, heads, width]` bytes, both
 * little-endian and row-major. A byte holds two values of a head, the first in its low half, in two's complement.
 * Returns float32 `[n, 2, heads, headDim]`, flat. Raises [IllegalArgumentException] on a wrong length.
 */
internal fun unpackRows(data: ByteArray, shape: RowShape): FloatArray {
    require(data.size % shape.bytes == 0) { "${data.size} bytes of rows are not a multiple of ${shape.bytes}" }
    val groups = data.size / shape.bytes * 2 * shape.heads
    val scales = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN)
    val rows = FloatArray(groups * shape.headDim)
    for (group in 0 until groups) {
        val scale = halfToFloat(scales.short.toInt())
        for (index in 0 until shape.headDim) {
            val pair = data[2 * groups + group * shape.width + index / 2].toInt()
            val value = if (index % 2 == 0) pair shl 28 shr 28 else pair shr 4
            rows[group * shape.headDim + index] = value * scale
        }
    }
    return rows
}

/** IEEE 754 half precision to single; exact. */
internal fun halfToFloat(bits: Int): Float {
    val sign = bits and 0x8000 shl 16
    val exponent = bits ushr 10 and 0x1F
    val fraction = bits and 0x3FF
    return when (exponent) {
        0 -> Float.fromBits(sign or (fraction * SUBNORMAL).toRawBits())
        0x1F -> Float.fromBits(sign or 0x7F800000 or (fraction shl 13))
        else -> Float.fromBits(sign or (exponent + 112 shl 23) or (fraction shl 13))
    }
}

/** The smallest positive half, 2^-24. */
private const val SUBNORMAL = 5.9604645e-8f
