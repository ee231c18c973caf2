package dev.outrider.core.drafting

import dev.outrider.core.protocol.RowShape
import java.nio.FloatBuffer

/**
 * The feature rows of one conversation, as cross-attention reads them.
 *
 * The row of position p is stored at p + 1; the slot before the first visible row takes the null row, so that
 * cross-attention reads one slice and nothing is copied.
 */
internal class FeatureRows(maxContext: Int, shape: RowShape, nullRow: FloatArray?) {
    private val half = shape.values / 2
    private val keys = Cache(1 + maxContext, half)
    private val values = Cache(1 + maxContext, half)
    private val filled = BooleanArray(maxContext)
    private val first = nullRow ?: FloatArray(shape.values)
    private val hasNullRow = nullRow != null

    /** [count] rows. */
    class Visible(val count: Int, val keys: FloatBuffer, val values: FloatBuffer)

    val none: Boolean get() = true !in filled

    fun keep(length: Int) = filled.fill(false, minOf(length, filled.size))

    fun add(positions: IntArray, rows: FloatArray) {
        for ((place, position) in positions.withIndex()) {
            keys.put(position + 1, rows, 2 * place, 1)
            values.put(position + 1, rows, 2 * place + 1, 1)
            filled[position] = true
        }
    }

    /**
     * Return the null row and the newest rows, back to the first gap (the verifier sends the newest first). A drafter
     * without a null row reads one row of zeros until the first row arrives.
     */
    fun visible(): Visible {
        val end = filled.lastIndexOf(true) + 1
        var start = end
        while (start > 0 && filled[start - 1]) start--
        val from = if (end > 0 && !hasNullRow) start + 1 else start
        if (from == start) {
            keys.put(start, first, 0, 1)
            values.put(start, first, 1, 1)
        }
        return Visible(end + 1 - from, keys.view(from, end + 1), values.view(from, end + 1))
    }
}
