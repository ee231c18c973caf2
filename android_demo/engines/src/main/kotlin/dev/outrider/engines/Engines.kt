/** Inference engines for the exported device half: ONNX Runtime and ExecuTorch. */
package dev.outrider.engines

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.BundleError
import dev.outrider.core.drafting.Engine
import dev.outrider.core.drafting.EngineError
import dev.outrider.core.drafting.NoDrafter
import java.io.File

/**
 * A library that can run an engine's file. probe: a class of the library; artifact: the dependency that an app adds for
 * it; open: uses the library, so it is called only if [probe] exists.
 */
private class Runtime(
    val probe: String,
    val artifact: String,
    val open: (file: File, bundle: Bundle, maxWidth: Int, threads: Int) -> Engine,
) {
    /** Whether the app ships the library. Does not load it. */
    val present: Boolean
        get() = try {
            Class.forName(probe, false, Runtime::class.java.classLoader)
            true
        } catch (_: ClassNotFoundException) {
            false
        }
}

/** By name in the manifest, best first. */
private val RUNTIMES = mapOf(
    "onnx" to Runtime("ai.onnxruntime.OrtEnvironment", "com.microsoft.onnxruntime:onnxruntime-android", ::OnnxEngine),
    "executorch" to Runtime("org.pytorch.executorch.Module", "org.pytorch:executorch-android", ::ExecuTorchEngine),
)

/**
 * Open engine [name] of [bundle], a key of its manifest's engines; null: the first with a library in the app, ONNX
 * Runtime before ExecuTorch. Returns [NoDrafter] for a bundle without a drafter.
 *
 * threads: of one step; 0: the library's choice. ExecuTorch has one thread pool for the whole process, which is set
 * here. An app may ship only one library; the other is not touched.
 *
 * Reads and packs the weights, which takes tens of milliseconds or more: do not call it on an app's main thread. Raises
 * [BundleError] if the bundle lacks the engine, [EngineError] if it cannot run here.
 */
public fun openEngine(bundle: Bundle, name: String? = null, threads: Int = 2): Engine {
    require(threads >= 0) { "threads must be 0 or more, not $threads" }
    val held = bundle.manifest.engines
    if (held.isEmpty()) return NoDrafter
    val known = RUNTIMES.keys.filter { it in held }.ifEmpty { held.keys.toList() }
    val chosen = name ?: known.firstOrNull { RUNTIMES[it]?.present == true } ?: known.firstOrNull()
    val entry = held[chosen]
        ?: throw BundleError("${bundle.folder} holds no $chosen engine (it has: ${held.keys.joinToString()})")
    val runtime = RUNTIMES[chosen] ?: throw BundleError(
        "${bundle.folder}: engine $chosen is unknown here (known: ${RUNTIMES.keys.joinToString()}); update the app",
    )
    if (!runtime.present) throw EngineError("nothing in this app runs ${entry.file}; add ${runtime.artifact}")
    for (file in listOfNotNull(entry.file, entry.data).map { File(bundle.folder, it) }) {
        if (!file.isFile) throw BundleError("$file is missing; copy the whole folder or export again")
    }
    val file = File(bundle.folder, entry.file)
    return try {
        runtime.open(file, bundle, entry.maxWidth, threads)
    } catch (error: LinkageError) { // no native library for this processor, or the system does not load it
        val reason = oneLine(error)
        throw EngineError("${runtime.artifact} does not load here: $reason; ship its natives for this ABI", error)
    }
}

/** Whether the app ships the library that runs engines of this [name]. */
internal fun hasRuntime(name: String): Boolean = RUNTIMES[name]?.present == true

/** Return the error's text without line breaks; libraries add hints and stack traces below. */
internal fun oneLine(error: Throwable): String =
    error.message?.split(Regex("\\s+"))?.joinToString(" ")?.trim()?.take(300)
        ?: error.cause?.let(::oneLine) ?: error.javaClass.simpleName
