package dev.outrider.core.runtime

/**
 * At most one [WriteToken], held until a reader can be expected to have read the token before. The first is not held.
 */
internal class HeldToken(private val session: Session) {
    private var action: WriteToken? = null
    private var due = 0.0

    fun hold(action: WriteToken) {
        this.action = action
    }

    /** When the token is due; null where none is held. */
    fun wakeAt(): Double? = action?.let { due }

    /** The token to write now, if its time has come or nobody wants it any more; it is not held after that. */
    fun release(now: Double): WriteToken? {
        val held = action ?: return null
        val wanted = held.version == session.version
        if (wanted && session.solo.mayBeTakenBack && now < due) return null
        action = null
        if (wanted) due = now + 1 / session.policy.offlineRate
        return held
    }
}
