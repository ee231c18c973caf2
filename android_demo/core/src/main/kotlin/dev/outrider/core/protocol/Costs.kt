package dev.outrider.core.protocol

import java.nio.ByteBuffer
import java.nio.ByteOrder

/** Most points of a curve on the wire. */
internal const val MAX_POINTS = 16

/**
 * The cost curve of a verifier's steps, advertised in WELCOME: seconds of a step by its tokens (of all sessions).
 *
 * Points ascend; straight lines between them. Devices choose trees and modes by it.
 */
internal data class CostCurve(val tokens: List<Long>, val seconds: List<Double>) {
    /** Return the seconds of a step of [count] tokens; beyond the last point the curve is extrapolated linearly. */
    fun at(count: Double): Double {
        if (count <= tokens[0] || tokens.size == 1) return seconds[0]
        val right = tokens.indexOfFirst { it >= count }.takeIf { it >= 0 } ?: tokens.lastIndex
        val x0 = tokens[right - 1]
        val y0 = seconds[right - 1]
        return y0 + (seconds[right] - y0) * (count - x0) / (tokens[right] - x0)
    }

    companion object {
        /** Decode uint32 pairs (tokens, microseconds); null if they are not an ascending curve of positive times. */
        fun unpack(data: ByteArray): CostCurve? {
            if (data.isEmpty() || data.size % 8 != 0) return null
            val numbers = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN)
            val pairs = List(data.size / 8) { numbers.unsigned() to numbers.unsigned() }
            if (pairs.zipWithNext().any { (one, next) -> one.first >= next.first }) return null
            if (pairs.any { it.second < 1 }) return null
            return CostCurve(pairs.map { it.first }, pairs.map { 1e-6 * it.second })
        }

        private fun ByteBuffer.unsigned() = int.toLong() and 0xFFFFFFFFL
    }
}
