package dev.outrider.core.answer

import dev.outrider.core.events.AnswerStats
import dev.outrider.core.link.Link
import dev.outrider.core.session.SessionStats

/** Times and bytes of one answer while it grows, and at its end its complete statistics. */
internal class StatsRecorder(private val link: Link?) {
    var draftSeconds = 0.0
    var aheadNodes = 0
    private val stallSeconds = ArrayList<Double>()
    private var stalledAt: Double? = null
    private var firstToken = 0.0
    private val began = now()
    private val up = link?.traffic?.up ?: 0
    private val down = link?.traffic?.down ?: 0

    /** Note tokens of the target. */
    fun committed() {
        if (firstToken == 0.0) firstToken = now() - began
    }

    /** Note a verdict that was due at [due] and did not come. */
    fun stalled(due: Double) {
        stalledAt = due
    }

    /** Note that a provisional token is shown. */
    fun wrote() {
        stalledAt?.let { stallSeconds += now() - it }
        stalledAt = null
    }

    /** Note that the target answers again. */
    fun resumed() {
        stalledAt = null
    }

    /** Return the statistics of the ended answer. counts: its session's. committed: the target's and adopted tokens. */
    fun end(counts: SessionStats, committed: Int): AnswerStats {
        val tokens = committed - counts.adopted
        val seconds = now() - began
        val tau = if (counts.rounds > 0) (counts.accepted + counts.rounds) / counts.rounds.toDouble() else 0.0
        return AnswerStats(
            counts, tokens, tau, seconds, tokens / seconds, firstToken, (link?.traffic?.up ?: 0) - up,
            (link?.traffic?.down ?: 0) - down, draftSeconds, aheadNodes, stallSeconds.toList(),
        )
    }
}
