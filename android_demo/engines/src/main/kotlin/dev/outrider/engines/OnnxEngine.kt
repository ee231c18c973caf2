package dev.outrider.engines

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtLoggingLevel
import ai.onnxruntime.OrtSession
import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.BundleError
import dev.outrider.core.drafting.DraftStep
import dev.outrider.core.drafting.Engine
import dev.outrider.core.drafting.EngineError
import dev.outrider.core.drafting.StepResult
import java.io.File
import java.nio.FloatBuffer
import java.nio.LongBuffer

/**
 * Runs an ONNX file of a bundle with ONNX Runtime on the CPU. Opened by [openEngine].
 *
 * The file is loaded by its path: its large weights are in a file beside it, which the library maps into memory. Inputs
 * are read in place, outputs are written into memory that steps reuse.
 */
internal class OnnxEngine internal constructor(
    file: File,
    bundle: Bundle,
    maxWidth: Int,
    threads: Int,
) : Engine {
    private val widths = Widths(bundle.manifest, maxWidth, bundle.draftIds.size)
    private val environment = OrtEnvironment.getEnvironment() // one for the process, never closed
    private val session = open(file, threads)
    private var closed = false

    private val tokens = Longs(maxWidth)
    private val positions = Longs(maxWidth)
    private val wanted = Longs(maxWidth)
    private val mask = Floats()
    private val logits = Floats()
    private val newKeys = Floats()
    private val newValues = Floats()

    /** Raises [IllegalArgumentException] on a step that does not fit the graph, [EngineError] if it fails. */
    @Synchronized
    override fun step(step: DraftStep): StepResult {
        check(!closed) { "the engine is closed" }
        widths.check(step)
        val size = step.tokens.size.toLong()
        val asked = step.wanted.size
        val tensors = ArrayList<OnnxTensor>(INPUTS.size + OUTPUTS.size)
        try {
            fun of(data: LongBuffer) =
                OnnxTensor.createTensor(environment, data, longArrayOf(data.remaining().toLong())).also(tensors::add)

            fun of(data: FloatBuffer, vararg shape: Long) =
                OnnxTensor.createTensor(environment, data, shape).also(tensors::add)

            fun ofHeads(data: FloatBuffer, count: Long, heads: Long) = of(data, count, heads, widths.headDim)

            val inputs = INPUTS.zip(
                listOf(
                    of(tokens.hold(step.tokens)), of(positions.hold(step.positions)), of(wanted.hold(step.wanted)),
                    of(mask.hold(step.mask), size, step.past + size),
                    ofHeads(step.keys, step.past.toLong(), widths.saHeads),
                    ofHeads(step.values, step.past.toLong(), widths.saHeads),
                    ofHeads(step.rowKeys, step.rows.toLong(), widths.rowHeads),
                    ofHeads(step.rowValues, step.rows.toLong(), widths.rowHeads),
                ),
            ).toMap()
            val results = listOf(
                logits.take(asked * widths.vocab), newKeys.take(widths.saValues(step.tokens.size)),
                newValues.take(widths.saValues(step.tokens.size)),
            )
            val outputs = OUTPUTS.zip(
                listOf(
                    of(results[0], asked.toLong(), widths.vocab.toLong()), ofHeads(results[1], size, widths.saHeads),
                    ofHeads(results[2], size, widths.saHeads),
                ),
            ).toMap()
            session.run(inputs, outputs).close()
            return StepResult(results[0].toArray(), results[1].toArray(), results[2].toArray())
        } catch (error: OrtException) {
            throw EngineError("ONNX Runtime failed in a draft step: ${oneLine(error)}", error)
        } finally {
            for (tensor in tensors) tensor.close()
        }
    }

    /** Wait for a running step. Afterwards the engine is unusable; closing it again does nothing. */
    @Synchronized
    override fun close() {
        if (!closed) session.close()
        closed = true
    }

    private fun open(file: File, threads: Int): OrtSession {
        val session = try {
            OrtSession.SessionOptions().use { options ->
                options.setIntraOpNumThreads(threads)
                options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR)
                options.setCPUArenaAllocator(false) // as fast here, and smaller: the arena grows by doubling
                options.addConfigEntry("session.intra_op.allow_spinning", "0") // spares the battery between steps
                environment.createSession(file.path, options)
            }
        } catch (error: OrtException) {
            throw EngineError("$file does not load: ${oneLine(error)}; export it for this version", error)
        }
        for ((verb, found, expected) in listOf(
            Triple("takes", session.inputNames, INPUTS), Triple("gives", session.outputNames, OUTPUTS),
        )) if (found != expected.toSet()) {
            session.close()
            throw BundleError("$file $verb ${found.joinToString()} instead of ${expected.joinToString()}; export again")
        }
        return session
    }
}
