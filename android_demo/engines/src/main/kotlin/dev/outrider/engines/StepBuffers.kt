package dev.outrider.engines

import dev.outrider.core.bundle.Manifest
import dev.outrider.core.drafting.DraftStep
import java.nio.Buffer
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.nio.LongBuffer

/** The names of the graphs' tensors, in their order, as in outrider_core/drafting/engines. */
internal val INPUTS =
    listOf("tokens", "positions", "wanted", "sa_mask", "sa_keys", "sa_values", "row_keys", "row_values")
internal val OUTPUTS = listOf("logits", "new_keys", "new_values")

/** Widths of one row, in values, of the inputs and outputs of a bundle's steps. */
internal class Widths(manifest: Manifest, val maxWidth: Int, val vocab: Int) {
    val saHeads = manifest.saKvHeads.toLong()
    val rowHeads = manifest.caKvHeads.toLong()
    val headDim = manifest.headDim.toLong()
    private val saRow = manifest.saKvHeads * manifest.headDim
    private val featureRow = manifest.caKvHeads * manifest.headDim

    /** Values of the keys (or values) of [tokens] tokens. */
    fun saValues(tokens: Int) = tokens * saRow

    /** Raise [IllegalArgumentException] on a step that does not fit the graph. */
    fun check(step: DraftStep) {
        val size = step.tokens.size
        require(size in 1..maxWidth) { "a step takes 1 to $maxWidth tokens, not $size" }
        require(step.positions.size == size) { "${step.positions.size} positions for $size tokens" }
        require(step.wanted.isNotEmpty() && step.wanted.size <= maxWidth && step.wanted.all { it in 0 until size }) {
            "wanted takes 1 to $maxWidth of a step's $size tokens, not ${step.wanted.joinToString()}"
        }
        require(step.past >= 0 && step.rows >= 1) { "${step.past} cached tokens and ${step.rows} rows" }
        require(step.mask.size == size * (step.past + size)) {
            "a mask of ${step.mask.size} values is not [$size, ${step.past} + $size]"
        }
        for ((what, buffer, values) in listOf(
            Triple("keys", step.keys, saValues(step.past)), Triple("values", step.values, saValues(step.past)),
            Triple("rowKeys", step.rowKeys, step.rows * featureRow),
            Triple("rowValues", step.rowValues, step.rows * featureRow),
        )) require(buffer.remaining() == values) { "$what hold ${buffer.remaining()} values instead of $values" }
    }
}

/** Direct memory that steps reuse; it grows with the largest one. */
internal class Floats {
    private var data = floats(0)

    /** Return room for [count] values, from the start of the memory; earlier values are overwritten. */
    fun take(count: Int): FloatBuffer {
        if (data.capacity() < count) data = floats(maxOf(count, 2 * data.capacity()))
        return data.duplicate().also { (it as Buffer).limit(count) }.slice()
    }

    /** Return the same, filled with [values]. */
    fun hold(values: FloatArray): FloatBuffer = take(values.size).also {
        it.put(values)
        (it as Buffer).rewind()
    }

    private fun floats(count: Int) = ByteBuffer.allocateDirect(4 * count).order(ByteOrder.nativeOrder()).asFloatBuffer()
}

/** Like [Floats], for whole numbers, at most [most]. */
internal class Longs(most: Int) {
    private val data = ByteBuffer.allocateDirect(8 * most).order(ByteOrder.nativeOrder()).asLongBuffer()

    fun hold(values: LongArray): LongBuffer = data.duplicate().also {
        it.put(values)
        (it as Buffer).flip()
    }.slice()
}

/** Copy the buffer's values to an array. */
internal fun FloatBuffer.toArray(): FloatArray = FloatArray(remaining()).also { get(it) }
