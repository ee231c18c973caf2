package dev.outrider.app.chat

import dev.outrider.core.link.LOOPBACK
import dev.outrider.core.runtime.Options
import dev.outrider.core.session.Offline
import dev.outrider.core.session.OnReturn
import dev.outrider.core.session.Policy
import dev.outrider.core.session.UnderstudyUse
import dev.outrider.core.session.WhoWrites

/** The emulator's name for the machine it runs on. */
private const val EMULATOR_HOST = "10.0.2.2"

/**
 * The user's choices. server: an address; empty: none. bundle: the name of a picked one; null: the app's own. sure:
 * stop writing offline if the device is unsure. understudy: its use, if the bundle has one.
 * executorch: run the drafter's `.pte` file, not the first engine that bundle and app have.
 */
data class Settings(
    val server: String = "",
    val writer: WhoWrites = WhoWrites.PREFER_CLOUD,
    val onReturn: OnReturn = OnReturn.REPAIR,
    val sure: Boolean = false,
    val bundle: String? = null,
    val understudy: UnderstudyUse = UnderstudyUse.COLD,
    val executorch: Boolean = false,
) {
    val address: String? get() = server.trim().ifEmpty { null }

    val deviceOnly: Boolean get() = address == null || writer == WhoWrites.DEVICE_ONLY

    /** [token]: for a verifier that needs one. Clear text goes only to this machine and the emulator's host. */
    fun options(token: String?): Options = Options(
        Policy(writer, onReturn, if (sure) Offline.PAUSE else Offline.SENTENCE, understudy = understudy),
        token = token?.trim()?.ifEmpty { null }?.let { { it } }, clearText = LOOPBACK + EMULATOR_HOST,
    )
}
