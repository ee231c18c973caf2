package dev.outrider.engines

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.BundleError
import dev.outrider.core.drafting.DraftStep
import dev.outrider.core.drafting.EngineError
import dev.outrider.core.drafting.StepResult
import java.io.DataOutputStream
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import kotlin.system.exitProcess

/**
 * Runs draft steps from a file: `Steps BUNDLE ENGINE THREADS STEPS RESULTS`.
 *
 * STEPS holds, little-endian, for each step the 32-bit numbers n, w, past and rows, then its 64-bit tokens, positions
 * and wanted, then its float32 mask, keys, values, rowKeys and rowValues. RESULTS gets for each step the float32
 * logits, keys and values. An error is one line on standard error: its class and message.
 */
fun main(arguments: Array<String>) {
    val (bundle, engine, threads, steps, results) = arguments
    try {
        run(Bundle.open(File(bundle)), engine.ifEmpty { null }, threads.toInt(), File(steps), File(results))
    } catch (error: Exception) {
        if (error !is BundleError && error !is EngineError && error !is IllegalArgumentException) throw error
        System.err.println("${error.javaClass.simpleName}: ${error.message}")
        exitProcess(1)
    }
}

private fun run(bundle: Bundle, name: String?, threads: Int, steps: File, results: File) {
    val data = ByteBuffer.wrap(steps.readBytes()).order(ByteOrder.LITTLE_ENDIAN)
    openEngine(bundle, name, threads).use { engine ->
        DataOutputStream(results.outputStream().buffered()).use { out ->
            while (data.hasRemaining()) out.write(bytes(engine.step(step(data, bundle))))
        }
        engine.close() // a second call does nothing
    }
}

private fun step(data: ByteBuffer, bundle: Bundle): DraftStep {
    val (size, asked, past, rows) = IntArray(4) { data.int }
    val row = bundle.manifest.saKvHeads * bundle.manifest.headDim
    val featureRow = bundle.manifest.caKvHeads * bundle.manifest.headDim
    return DraftStep(
        longs(data, size), longs(data, size), longs(data, asked), FloatArray(size * (past + size)) { data.float }, past,
        direct(data, past * row), direct(data, past * row), rows, direct(data, rows * featureRow),
        direct(data, rows * featureRow),
    )
}

private fun longs(data: ByteBuffer, count: Int) = LongArray(count) { data.long }

private fun direct(data: ByteBuffer, count: Int): FloatBuffer {
    val buffer = ByteBuffer.allocateDirect(4 * count).order(ByteOrder.nativeOrder()).asFloatBuffer()
    for (index in 0 until count) buffer.put(index, data.float)
    return buffer
}

private fun bytes(result: StepResult): ByteArray {
    val all = result.logits + result.keys + result.values
    val bytes = ByteBuffer.allocate(4 * all.size).order(ByteOrder.LITTLE_ENDIAN)
    for (value in all) bytes.putFloat(value)
    return bytes.array()
}
