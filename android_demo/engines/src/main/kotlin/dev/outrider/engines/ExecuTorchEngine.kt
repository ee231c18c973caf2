package dev.outrider.engines

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.drafting.DraftStep
import dev.outrider.core.drafting.Engine
import dev.outrider.core.drafting.EngineError
import dev.outrider.core.drafting.StepResult
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.nio.LongBuffer
import org.pytorch.executorch.EValue
import org.pytorch.executorch.Module
import org.pytorch.executorch.Tensor

/** Additive mask value that hides a key from a query. */
private const val MASKED = -1e9f

/**
 * Runs a .pte file of a bundle with ExecuTorch. Opened by [openEngine].
 *
 * The file is mapped into memory. Inputs are read in place; the garbage collector frees the native halves of a step's
 * tensors, as the library requires.
 */
internal class ExecuTorchEngine internal constructor(
    file: File,
    bundle: Bundle,
    maxWidth: Int,
    threads: Int,
) : Engine {
    private val widths = Widths(bundle.manifest, maxWidth, bundle.draftIds.size)
    private val module = open(file, threads)
    private var closed = false

    private val tokens = Longs(maxWidth)
    private val positions = Longs(maxWidth)
    private val wanted = Longs(maxWidth)
    private val mask = Floats()

    /** Replaces an empty past: one masked row, as XNNPACK supports no empty tensors. */
    private val nothing =
        ByteBuffer.allocateDirect(4 * widths.saValues(1)).order(ByteOrder.nativeOrder()).asFloatBuffer()

    /** Raises [IllegalArgumentException] on a step that does not fit the graph, [EngineError] if it fails. */
    @Synchronized
    override fun step(step: DraftStep): StepResult {
        check(!closed) { "the engine is closed" }
        widths.check(step)
        val size = step.tokens.size.toLong()
        val past = maxOf(step.past, 1).toLong()
        val masked = if (step.past > 0) step.mask else behindNothing(step.mask, step.tokens.size)
        val outputs = try {
            module.forward(
                of(tokens.hold(step.tokens)), of(positions.hold(step.positions)), of(wanted.hold(step.wanted)),
                of(mask.hold(masked), size, past + size),
                ofHeads(if (step.past > 0) step.keys else nothing, past, widths.saHeads),
                ofHeads(if (step.past > 0) step.values else nothing, past, widths.saHeads),
                ofHeads(step.rowKeys, step.rows.toLong(), widths.rowHeads),
                ofHeads(step.rowValues, step.rows.toLong(), widths.rowHeads),
            )
        } catch (error: RuntimeException) { // the library's own kinds, some of them subclasses of Java's
            throw EngineError("ExecuTorch failed in a draft step: ${oneLine(error)}", error)
        }
        val (logits, keys, values) = outputs.map { it.toTensor().dataAsFloatArray }
        return StepResult(logits, keys, values)
    }

    /** Wait for a running step. Afterwards the engine is unusable; closing it again does nothing. */
    @Synchronized
    override fun close() {
        if (!closed) module.close()
        closed = true
    }

    private fun of(data: LongBuffer) = EValue.from(Tensor.fromBlob(data, longArrayOf(data.remaining().toLong())))

    private fun of(data: FloatBuffer, vararg shape: Long) = EValue.from(Tensor.fromBlob(data, shape))

    private fun ofHeads(data: FloatBuffer, count: Long, heads: Long) = of(data, count, heads, widths.headDim)

    /** [mask] `[n, n]` with a masked column before it. */
    private fun behindNothing(mask: FloatArray, size: Int) =
        FloatArray(size * (size + 1)) { if (it % (size + 1) == 0) MASKED else mask[it - it / (size + 1) - 1] }

    private fun open(file: File, threads: Int): Module {
        val module = try {
            Module.load(file.path, Module.LOAD_MODE_MMAP, threads)
        } catch (error: RuntimeException) {
            throw EngineError("$file does not load: ${oneLine(error)}; export it for this version", error)
        }
        try {
            module.loadMethod("forward")
        } catch (error: RuntimeException) {
            module.close()
            throw EngineError("$file does not load: ${oneLine(error)}; export it for this version", error)
        }
        return module
    }
}
