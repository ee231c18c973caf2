package dev.outrider.core.drafting

import java.nio.Buffer
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer

/** [rows] rows of [width] float32 values in direct memory, which engines read without a copy. All zero at first. */
internal class Cache(val rows: Int, private val width: Int) {
    private val data: FloatBuffer =
        ByteBuffer.allocateDirect(4 * rows * width).order(ByteOrder.nativeOrder()).asFloatBuffer()

    /** The rows [from] until [to]. */
    fun view(from: Int, to: Int): FloatBuffer {
        val view = data.duplicate()
        val bounds: Buffer = view // the type that a newer Java would return is missing on older Androids
        bounds.limit(to * width)
        bounds.position(from * width)
        return view.slice()
    }

    /** Writes [count] rows from [values], the first of them at [at], to [row] and on. */
    fun put(row: Int, values: FloatArray, at: Int = 0, count: Int = values.size / width - at) {
        view(row, row + count).put(values, at * width, count * width)
    }

    /** Move the rows [from], in their order, to [start] and on. */
    fun move(from: IntArray, start: Int) {
        val moved = FloatArray(from.size * width)
        for ((place, row) in from.withIndex()) view(row, row + 1).get(moved, place * width, width)
        put(start, moved)
    }
}
