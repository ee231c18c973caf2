package dev.outrider.core.answer

import dev.outrider.core.session.WriteToken

/** Most seconds that a writer may lag behind a reader and then catch up. */
private const val MADE_UP = 1.0

/**
 * Models a reader of offline text, at [rate] tokens per second, from the first token on. committed, provisional:
 * verified tokens of the text, and unverified ones after them.
 */
internal class Reader(private val rate: Double) {
    private var committed = -1 // tokens of the text after which reading began ...
    private var began = 0.0 // ... at this time
    private var next = 0.0 // when another token would be read, anywhere

    /** Return when the reader reaches the next token; that is past if other tokens stood there before. */
    fun due(committed: Int, provisional: Int): Double =
        if (committed == this.committed) began + provisional / rate else next

    /** Note that another token is shown there. */
    fun shown(committed: Int, provisional: Int, now: Double) {
        val came = now - provisional / rate // a reader who is there now began then
        began = if (committed == this.committed) maxOf(began, came - MADE_UP) else came
        this.committed = committed
        next = now + 1 / rate
    }
}

/** Holds at most one [WriteToken] until its time has come; [rate]: tokens per second. The first one is not held. */
internal class HeldToken(rate: Double) {
    private var action: WriteToken? = null
    private var committed = 0 // verified tokens of its text
    private var paced = false
    private val reader = Reader(rate)

    /**
     * Hold [action], whose token will follow [committed] verified ones and the provisional ones. Without [paced] it is
     * due at once.
     */
    fun hold(action: WriteToken, committed: Int, paced: Boolean) {
        this.action = action
        this.committed = committed
        this.paced = paced
    }

    /** When the token is due; null if none is held. */
    fun wakeAt(): Double? = action?.let { if (paced) reader.due(committed, it.prefix.size - committed) else 0.0 }

    /** Release the token to write now, if its time has come or [version] shows that it is stale. */
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
