package dev.outrider.app.chat

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.runtime.EdgeRuntime
import dev.outrider.engines.openEngine
import dev.outrider.engines.openUnderstudy
import java.io.Closeable
import java.io.File

/** A bundle and the runtime over it. Closing closes the runtime, its engine and its link. */
class Opened(val bundle: Bundle, val runtime: EdgeRuntime, val deviceOnly: Boolean) : Closeable by runtime {
    companion object {
        /**
         * Open the bundle in [folder], every hash checked, and its engine. May take a second. Raises the errors of
         * [Bundle.open], [openEngine] and [EdgeRuntime].
         */
        fun from(folder: File, settings: Settings, token: String?): Opened {
            val bundle = Bundle.open(folder)
            val engine = openEngine(bundle, if (settings.executorch) "executorch" else null)
            try {
                val understudy = openUnderstudy(bundle)
                val runtime = EdgeRuntime(bundle, engine, settings.address, settings.options(token), understudy)
                return Opened(bundle, runtime, settings.deviceOnly)
            } catch (error: Exception) {
                engine.close()
                throw error
            }
        }
    }
}
