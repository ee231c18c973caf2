package dev.outrider.engines

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtLoggingLevel
import ai.onnxruntime.OrtSession
import dev.outrider.core.bundle.Bundle
import dev.outrider.core.drafting.EngineError
import dev.outrider.core.targets.TargetBundle
import dev.outrider.core.targets.Understudy
import dev.outrider.core.targets.UnderstudyModel
import java.io.File
import java.nio.Buffer
import java.nio.DoubleBuffer
import java.nio.FloatBuffer
import java.nio.LongBuffer

/**
 * Return the understudy of [bundle], for [dev.outrider.core.runtime.EdgeRuntime]; null if its manifest names none that
 * runs here. Its folder may arrive later. Nothing is loaded before the understudy is used.
 *
 * threads: of one step; 0: the library's choice.
 */
public fun openUnderstudy(bundle: Bundle, threads: Int = 2): Understudy? {
    require(threads >= 0) { "threads must be 0 or more, not $threads" }
    val entry = bundle.manifest.understudy ?: return null
    if (entry.format != "onnx" || !hasRuntime("onnx")) return null
    val checked by lazy { TargetBundle.open(File(bundle.folder, entry.folder), entry.manifestSha256) } // once
    val manifest = bundle.manifest
    val (vocab, longest) = manifest.vocabSize to manifest.maxContext
    return Understudy(bundle::decode, bundle::hasUnderstudy, vocab, longest, entry.barred) {
        OnnxUnderstudy(checked, longest, threads)
    }
}

/**
 * Runs a target's graph (`outrider_core/targets/graph.py`) for one text of at most [maxContext] tokens. Keys and values
 * stay in the graph's pool, which grows with the text. Raises [EngineError] if it does not load.
 */
internal class OnnxUnderstudy(target: TargetBundle, private val maxContext: Int, threads: Int) : UnderstudyModel {
    private val feeds = TargetFeeds(target.shape)
    private val environment = OrtEnvironment.getEnvironment() // one for the process, never closed
    private val session = open(target.graph, threads)
    private val pool = TargetPool(target.shape, environment)
    private val logits = Floats()
    private val vocab = target.shape.vocabSize

    override fun step(past: Int, tokens: List<Int>, wanted: Int): List<FloatArray> {
        require(past >= 0 && tokens.isNotEmpty() && past + tokens.size <= maxContext) {
            "${tokens.size} tokens behind $past do not fit a context of $maxContext"
        }
        require(wanted in 1..tokens.size) { "logits of $wanted of ${tokens.size} tokens" }
        val feed = feeds.of(past, tokens, wanted)
        val found = logits.take(wanted * vocab)
        val tensors = ArrayList<OnnxTensor>()
        try {
            fun tensor(data: Buffer, vararg shape: Long) = tensorOf(data, shape).also(tensors::add)

            val inputs = feed.inputs.mapValues { (_, input) -> tensor(input.data, *input.shape) }
            val result = tensor(found, wanted.toLong(), vocab.toLong())
            val blocks = pool.of(feed.blocks)
            session.run(inputs + blocks, blocks.mapKeys { (name, _) -> "new_$name" } + ("logits" to result)).close()
        } catch (error: OrtException) {
            throw EngineError("ONNX Runtime failed in the understudy: ${oneLine(error)}", error)
        } finally {
            for (tensor in tensors) tensor.close()
        }
        return List(wanted) { FloatArray(vocab).also { row -> found.get(row) } }
    }

    override fun close() {
        pool.close()
        session.close()
    }

    private fun tensorOf(data: Buffer, shape: LongArray): OnnxTensor = when (data) {
        is LongBuffer -> OnnxTensor.createTensor(environment, data, shape)
        is FloatBuffer -> OnnxTensor.createTensor(environment, data, shape)
        else -> OnnxTensor.createTensor(environment, data as DoubleBuffer, shape)
    }

    private fun open(file: File, threads: Int): OrtSession = try {
        OrtSession.SessionOptions().use { options ->
            options.setIntraOpNumThreads(threads)
            options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR)
            options.setCPUArenaAllocator(false)
            options.addConfigEntry("session.intra_op.allow_spinning", "0") // spares the battery between steps
            environment.createSession(file.path, options)
        }
    } catch (error: OrtException) {
        throw EngineError("the understudy does not load: ${oneLine(error)}", error)
    }
}
