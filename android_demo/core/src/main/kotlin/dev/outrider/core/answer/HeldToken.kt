package dev.outrider.core.answer

import dev.outrider.core.session.Session
import dev.outrider.core.session.WriteToken

/** Seconds that a writer is behind a reader, at most, and makes up for. */
private const val MADE_UP = 1.0

/**
 * Somebody who reads what is written alone, at [rate] tokens per second, from the first token on. committed,
 * provisional: tokens of the text that are verified, and unverified ones behind them.
 */
internal class Reader(private val rate: Double) {
    private var committed = -1 // tokens of a text, behind which reading ...
    private var began = 0.0 // ... began then
    private var next = 0.0 // when another token would be read, wherever it stands

    /** When the reader comes to where the next token will stand; that is over where others stood there before. */
    fun due(committed: Int, provisional: Int): Double =
        if (committed == this.committed) began + provisional / rate else next

    /** Another token stands there. */
    fun shown(committed: Int, provisional: Int, now: Double) {
        val came = now - provisional / rate // who was there just now began then
        began = if (committed == this.committed) maxOf(began, came - MADE_UP) else came
        this.committed = committed
        next = now + 1 / rate
    }
}

/** At most one [WriteToken], held until its time has come. The first is not held. */
internal class HeldToken(private val session: Session) {
    private var action: WriteToken? = null
    private val reader = Reader(session.policy.offlineRate)

    fun hold(action: WriteToken) {
        this.action = action
    }

    /** When the token is due; null where none is held. */
    fun wakeAt(): Double? = action?.let { reader.due(session.committed.size, session.provisional.size) }

    /** The token to write now, if its time has come or nobody wants it any more; it is not held after that. */
    fun release(now: Double): WriteToken? {
        val held = action ?: return null
        val due = wakeAt() ?: return null
        val paced = held.version == session.version && session.solo.mayBeTakenBack
        if (paced && now < due) return null
        action = null
        if (paced) reader.shown(session.committed.size, session.provisional.size, now)
        return held
    }
}
