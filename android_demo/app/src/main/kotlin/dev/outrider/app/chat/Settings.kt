package dev.outrider.app.chat

import dev.outrider.core.runtime.LOOPBACK
import dev.outrider.core.runtime.Offline
import dev.outrider.core.runtime.OnReturn
import dev.outrider.core.runtime.Options
import dev.outrider.core.runtime.Policy
import dev.outrider.core.runtime.Writer

/** The emulator's name for the machine it runs on. */
private const val EMULATOR_HOST = "10.0.2.2"

/**
 * What the user chose. server: an address; empty: none. bundle: the name of one that the user picked; null: the app's
 * own. sure: stop writing alone where the drafter is unsure.
 */
data class Settings(
    val server: String = "",
    val writer: Writer = Writer.PREFER_CLOUD,
    val onReturn: OnReturn = OnReturn.REPAIR,
    val sure: Boolean = false,
    val bundle: String? = null,
) {
    val address: String? get() = server.trim().ifEmpty { null }

    val deviceOnly: Boolean get() = address == null || writer == Writer.DEVICE_ONLY

    /** [token]: for an address that asks for one. Clear text goes to this machine and the emulator's host alone. */
    fun options(token: String?): Options = Options(
        Policy(writer, onReturn, if (sure) Offline.PAUSE else Offline.CONTINUE),
        token = token?.trim()?.ifEmpty { null }, clearText = LOOPBACK + EMULATOR_HOST,
    )
}
