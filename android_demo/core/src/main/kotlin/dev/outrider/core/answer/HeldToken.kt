package dev.outrider.core.answer

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

    /** When the reader reaches the next token; that is past if other tokens stood there before. */
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

/** At most one [WriteToken], held until its time has come; [rate]: tokens per second. The first is not held. */
internal class HeldToken(rate: Double) {
    private var action: WriteToken? = null
    private var committed = 0 // tokens of its text that are verified
    private var paced = false
    private val reader = Reader(rate)

    /**
     * Hold [action], whose token will stand behind [committed] verified ones and what is provisional; without [paced]
     * it is due at once.
     */
    fun hold(action: WriteToken, committed: Int, paced: Boolean) {
        this.action = action
        this.committed = committed
        this.paced = paced
    }

    /** When the token is due; null if none is held. */
    fun wakeAt(): Double? = action?.let { if (paced) reader.due(committed, it.prefix.size - committed) else 0.0 }

    /** The token to write now, if its time has come or it is stale, as jobs carry [version] now; it is free then. */
    fun release(now: Double, version: Int): WriteToken? {
        val held = action ?: return null
        val due = wakeAt() ?: return null
        val stale = held.version != version
        if (!stale && now < due) return null
        action = null
        if (paced && !stale) reader.shown(committed, held.prefix.size - committed, now)
        return held
    }
}
