package dev.outrider.core.drafting

import dev.outrider.core.protocol.EngineApi
import dev.outrider.core.protocol.OutriderError
import java.io.Closeable
import java.nio.FloatBuffer

/**
 * The inputs of a draft step. Arrays are row-major; buffers are direct, hold exactly their shape and are valid only
 * during the step.
 *
 * tokens, positions `[n]`; wanted `[w]`: the queries whose logits are returned; mask `[n, past + n]`: added to the
 * scores; keys, values `[past, kvHeads, headDim]`: of self-attention; rowKeys, rowValues `[rows, rowHeads, headDim]`:
 * of cross-attention, rows >= 1.
 */
@EngineApi
public class DraftStep(
    public val tokens: LongArray,
    public val positions: LongArray,
    public val wanted: LongArray,
    public val mask: FloatArray,
    public val past: Int,
    public val keys: FloatBuffer,
    public val values: FloatBuffer,
    public val rows: Int,
    public val rowKeys: FloatBuffer,
    public val rowValues: FloatBuffer,
)

/** logits `[w, draftVocab]`; keys, values `[n, kvHeads, headDim]`: of the step's tokens. */
@EngineApi
public class StepResult(public val logits: FloatArray, public val keys: FloatArray, public val values: FloatArray)

/** An engine cannot be opened, or a step failed. */
public class EngineError(message: String, cause: Throwable? = null) : OutriderError(message, cause)

/** Runs the device half. All drafting state is the caller's; an engine is one pure function. One thread calls it. */
public interface Engine : Closeable {
    /** Run one step. Raises the engine's errors, mostly [EngineError], which end the answer. */
    @EngineApi
    public fun step(step: DraftStep): StepResult
}

/**
 * Replaces the engine of a bundle without a drafter: it proposes nothing, so lookup alone makes the trees. It knows one
 * token, whose logit is -inf.
 */
@EngineApi
public object NoDrafter : Engine {
    override fun step(step: DraftStep): StepResult {
        val nothing = FloatArray(step.tokens.size)
        return StepResult(FloatArray(step.wanted.size) { Float.NEGATIVE_INFINITY }, nothing, nothing)
    }

    override fun close(): Unit = Unit
}
