package dev.outrider.core.answer

import dev.outrider.core.events.AnswerStats
import dev.outrider.core.link.Link
import dev.outrider.core.session.SessionStats

/** Times and bytes of one answer while it grows, and at its end all of its statistics. */
internal class StatsRecorder(private val link: Link?) {
    var draftSeconds = 0.0
    var aheadNodes = 0
    private val stallSeconds = ArrayList<Double>()
    private var stalledAt: Double? = null
    private var firstToken = 0.0
    private val began = now()
    private val up = link?.traffic?.up ?: 0
    private val down = link?.traffic?.down ?: 0

    /** The target's tokens are there. */
    fun committed() {
        if (firstToken == 0.0) firstToken = now() - began
    }

    /** A verdict that was due at [due] did not come. */
    fun stalled(due: Double) {
        stalledAt = due
    }

    /** A provisional token is shown. */
    fun wrote() {
        stalledAt?.let { stallSeconds += now() - it }
        stalledAt = null
    }

    /** The target answers again. */
    fun resumed() {
        stalledAt = null
    }

    /** The answer has ended. counts: its session's. committed: tokens of the target, and those that were adopted. */
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
