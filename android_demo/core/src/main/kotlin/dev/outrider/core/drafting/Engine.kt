package dev.outrider.core.drafting

import java.io.Closeable
import java.nio.FloatBuffer

/**
 * What a draft step reads. Arrays are row-major; buffers are direct, hold exactly their shape and are valid during the
 * step alone.
 *
 * tokens, positions `[n]`; wanted `[w]`: the queries whose logits are asked for; mask `[n, past + n]`: added to the
 * scores; keys, values `[past, kvHeads, headDim]`: of self-attention; rowKeys, rowValues `[rows, rowHeads, headDim]`:
 * of cross-attention, rows >= 1.
 */
class DraftStep(
    val tokens: LongArray,
    val positions: LongArray,
    val wanted: LongArray,
    val mask: FloatArray,
    val past: Int,
    val keys: FloatBuffer,
    val values: FloatBuffer,
    val rows: Int,
    val rowKeys: FloatBuffer,
    val rowValues: FloatBuffer,
)

/** logits `[w, draftVocab]`; keys, values `[n, kvHeads, headDim]`: of the step's tokens. */
class StepResult(val logits: FloatArray, val keys: FloatArray, val values: FloatArray)

/** Runs the device half. All drafting state is the caller's; an engine is one pure function. One thread calls it. */
interface Engine : Closeable {
    fun step(step: DraftStep): StepResult
}

/**
 * Stands in for the engine of a bundle without a drafter: it proposes nothing, so lookup alone makes the trees. It
 * knows one token, whose logit is -inf.
 */
object NoDrafter : Engine {
    override fun step(step: DraftStep): StepResult {
        val nothing = FloatArray(step.tokens.size)
        return StepResult(FloatArray(step.wanted.size) { Float.NEGATIVE_INFINITY }, nothing, nothing)
    }

    override fun close() = Unit
}
