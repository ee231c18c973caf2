package dev.outrider.engines

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.int
import dev.outrider.core.bundle.ints
import dev.outrider.core.drafting.DraftStep
import dev.outrider.core.drafting.Drafter
import dev.outrider.core.drafting.Engine
import dev.outrider.core.drafting.StepResult
import dev.outrider.core.drafting.TreeShape
import dev.outrider.core.protocol.RowShape
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer

/** Value [index] of all random-looking inputs; benchmarks/jvm.py has the same. Exact in float32. */
private fun sample(index: Int) = (index * 7919L % 1024 - 512) / 256f

/** An engine that adds up the time of its steps. */
private class Timed(private val engine: Engine) : Engine {
    var seconds = 0.0
    var steps = 0

    override fun step(step: DraftStep): StepResult {
        val began = System.nanoTime()
        return engine.step(step).also {
            seconds += (System.nanoTime() - began) / 1e9
            steps++
        }
    }

    override fun close() = engine.close()
}

/** For benchmarks/jvm.py: reads a JSON line of settings, then answers each line with a figure as a JSON line. */
fun main() {
    val settings = Json.parse(readln())
    val begun = memory()
    val bundle = Bundle.open(File(settings.field<String>("bundle")), verify = settings.field("verify"))
    val opened = memory()
    openEngine(bundle, settings.field<String?>("engine"), settings.int("threads")).use { engine ->
        val loaded = memory()
        val timed = Timed(engine)
        for (line in generateSequence(::readlnOrNull)) {
            val asked = Json.parse(line)
            val figures = when (asked.field<String>("what")) {
                "step" -> steps(engine, bundle, asked)
                "draft" -> drafts(timed, bundle, asked)
                else -> mapOf("begun" to begun, "opened" to opened, "loaded" to loaded, "now" to memory())
            }
            println(Json.write(figures))
        }
    }
}

/** Return the times of one repeated step. */
private fun steps(engine: Engine, bundle: Bundle, asked: Any?): Map<String, Any?> {
    val (width, past) = asked.int("width") to asked.int("past")
    val manifest = bundle.manifest
    val rows = manifest.caKvHeads * manifest.headDim
    val keys = manifest.saKvHeads * manifest.headDim
    val step = DraftStep(
        LongArray(width) { it * 7919L % manifest.vocabSize }, LongArray(width) { past.toLong() + it },
        LongArray(width) { it.toLong() },
        FloatArray(width * (past + width)) { if (it % (past + width) > past + it / (past + width)) -1e9f else 0f },
        past, direct(past * keys), direct(past * keys), past, direct(past * rows), direct(past * rows),
    )
    val seconds = DoubleArray(asked.int("count"))
    for (index in seconds.indices) {
        val began = System.nanoTime()
        engine.step(step)
        seconds[index] = (System.nanoTime() - began) / 1e9
    }
    return mapOf("seconds" to seconds.toList())
}

/** Time of a draft after each of the last tokens of some texts, in total and in the engine, and the trees. */
private fun drafts(engine: Timed, bundle: Bundle, asked: Any?): Map<String, Any?> {
    val shape = TreeShape(asked.int("nodes"))
    val sampling = Vectors.sampling(asked.field<Any>("sampling"))
    val seconds = ArrayList<Double>()
    val trees = ArrayList<List<Int>>()
    var inside = 0.0
    var steps = 0
    for (text in asked.field<List<Any?>>("texts").map { mapOf("ids" to it).ints("ids") }) {
        val drafter = drafter(engine, bundle, text.size)
        for (end in asked.int("start")..text.size) {
            val prefix = text.subList(0, end)
            engine.seconds = 0.0
            engine.steps = 0
            val began = System.nanoTime()
            val tree = drafter.draft(prefix, sampling, shape).tree
            val taken = (System.nanoTime() - began) / 1e9
            trees += tree.tokens + tree.parents
            if (end == asked.int("start")) continue // this one fills the cache
            seconds += taken
            inside += engine.seconds
            steps += engine.steps
        }
    }
    return mapOf("seconds" to seconds, "engine" to inside, "steps" to steps, "trees" to trees)
}

/** Make a drafter with feature rows of all tokens but the last. */
private fun drafter(engine: Engine, bundle: Bundle, length: Int): Drafter {
    val manifest = bundle.manifest
    val shape: RowShape = manifest.rowShape
    val drafter = Drafter(
        engine, bundle.draftIds, shape, manifest.saKvHeads, manifest.maxContext, nullRow = bundle.nullRow,
        confidenceTemperature = manifest.confidenceTemperature, rowCost = 0.3, // as Python's
    )
    drafter.addRows(IntArray(length - 1) { it }, FloatArray((length - 1) * shape.values, ::sample))
    return drafter
}

private fun direct(count: Int): FloatBuffer {
    val buffer = ByteBuffer.allocateDirect(4 * count).order(ByteOrder.nativeOrder()).asFloatBuffer()
    for (index in 0 until count) buffer.put(index, sample(index))
    return buffer
}

/** Return kB of this process: resident, the highest so far, and used in Java's heap. */
private fun memory(): Map<String, Long> {
    System.gc()
    val rows = File("/proc/self/status").readLines().associate { it.substringBefore(':') to it.substringAfter(':') }
    val runtime = Runtime.getRuntime()
    return listOf("VmRSS", "VmHWM").associateWith { rows.getValue(it).trim().substringBefore(' ').toLong() } +
        ("heap" to (runtime.totalMemory() - runtime.freeMemory()) / 1024)
}
