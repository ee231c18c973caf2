package dev.outrider.core.session

import dev.outrider.core.protocol.RowShape
import dev.outrider.core.protocol.unpackRows

/** The positions whose feature rows the drafter holds. */
internal class RowsSeen private constructor(private var seen: BooleanArray) {
    constructor() : this(BooleanArray(0))

    /** How many of the first positions are held without a gap. */
    val leading: Int get() = seen.indexOf(false).let { if (it < 0) seen.size else it }

    /** Return the record of the first [length] positions. */
    fun upTo(length: Int) = RowsSeen(seen.copyOf(minOf(length, seen.size)))

    /**
     * Unpack rows of positions [start] and on; [limit] of them belong to our text. Returns those that are new to the
     * drafter.
     *
     * Rows that do not fit are ignored: rows only ever cost speed.
     */
    internal fun add(start: Int, data: ByteArray, shape: RowShape, maxContext: Int, limit: Int): List<Action> {
        if (data.size % shape.bytes != 0) return emptyList()
        val count = minOf(data.size / shape.bytes, limit)
        if (start < 0 || start > maxContext - count) return emptyList()
        if (seen.size < start + count) seen = seen.copyOf(start + count)
        val new = (0 until count).filter { !seen[start + it] }
        if (new.isEmpty()) return emptyList()
        val values = unpackRows(data, shape)
        val rows = FloatArray(new.size * shape.values)
        for ((place, index) in new.withIndex()) {
            seen[start + index] = true
            values.copyInto(rows, place * shape.values, index * shape.values, (index + 1) * shape.values)
        }
        return listOf(AddRows(IntArray(new.size) { start + new[it] }, rows))
    }
}
