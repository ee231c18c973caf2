package dev.outrider.testing

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.drafting.DraftStep
import dev.outrider.core.drafting.Engine
import dev.outrider.core.drafting.StepResult
import dev.outrider.core.protocol.fmix32
import java.nio.FloatBuffer

/**
 * An engine without a model, for tests: its logits are a hash of everything that a query sees, so texts are
 * reproducible. All ports implement the rule, which is in tests/android/drafter_vectors.py.
 *
 * draftIds: token ids of the logits; width: values of one cached key; rowWidth: of one feature row's keys. script: a
 * text, prompt included, that it tends to predict, as a trained drafter would; not in the vectors.
 */
public class FakeEngine(
    private val draftIds: IntArray,
    private val width: Int,
    private val rowWidth: Int,
    @Volatile internal var script: List<Int> = emptyList(),
) : Engine {
    /** Makes one with the shapes of the drafter in [bundle]. */
    public constructor(bundle: Bundle) : this(
        bundle.draftIds, with(bundle.manifest) { saKvHeads * headDim }, bundle.manifest.rowShape.values / 2,
    )

    override fun step(step: DraftStep): StepResult {
        val size = step.tokens.size
        check(step.mask.size == size * (step.past + size) && step.keys.remaining() == step.past * width)
        check(step.values.remaining() == step.past * width && step.rows >= 1)
        check(step.rowKeys.remaining() == step.rows * rowWidth && step.rowValues.remaining() == step.rows * rowWidth)
        val keys = FloatArray(size * width)
        for (row in 0 until size) {
            keys[row * width] = step.tokens[row].toFloat()
            keys[row * width + 1] = step.positions[row].toFloat()
        }
        val logits = FloatArray(step.wanted.size * draftIds.size)
        for ((place, query) in step.wanted.withIndex()) {
            row(step, query.toInt(), FloatBuffer.wrap(keys)).copyInto(logits, place * draftIds.size)
        }
        return StepResult(logits, keys, keys)
    }

    private fun row(step: DraftStep, query: Int, keys: FloatBuffer): FloatArray {
        val all = step.past + step.tokens.size
        val seen = ArrayList<Int>()
        var h = 1
        for (key in 0 until all) {
            if (step.mask[query * all + key] != 0f) continue
            val from = if (key < step.past) step.keys else keys
            val at = (if (key < step.past) key else key - step.past) * width
            seen += from.get(at).toInt()
            check(from.get(at + 1).toInt() == seen.lastIndex) { "positions have gaps or repeats" }
            h = fmix32(h xor (0x9E3779B1.toInt() * seen.last() + seen.lastIndex))
        }
        for (row in 0 until step.rows) h = fmix32(h xor (16 * step.rowKeys.get(row * rowWidth)).toInt())
        val logits = FloatArray(draftIds.size) { (fmix32(h xor fmix32(it)) ushr 16) / 8192f }
        val next = if (seen.size < script.size && script.subList(0, seen.size) == seen) script[seen.size] else -1
        val column = draftIds.indexOf(next)
        if (column >= 0 && (h ushr 8) % 10 < 8) logits[column] += 8f
        return logits
    }

    override fun close(): Unit = Unit
}
