package dev.outrider.core.answer

import dev.outrider.core.events.AnswerStats
import dev.outrider.core.link.Link
import dev.outrider.core.session.Session

/** Collects the figures of one answer while it grows. */
internal class Figures(private val session: Session, private val link: Link?) {
    var draftSeconds = 0.0
    var aheadNodes = 0
    private val stallSeconds = ArrayList<Double>()
    private var stalledAt: Double? = null
    private var firstToken = 0.0
    private val began = now()
    private val up = link?.traffic?.up ?: 0
    private val down = link?.traffic?.down ?: 0

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

    fun end(): AnswerStats {
        val of = session.stats
        val tokens = session.committed.size - session.prompt.size - of.adopted
        val seconds = now() - began
        return AnswerStats(
            tokens, of.rounds, if (of.rounds > 0) (of.accepted + of.rounds) / of.rounds.toDouble() else 0.0, of.nodes,
            of.chains, of.calls, of.streamed, seconds, tokens / seconds, firstToken,
            (link?.traffic?.up ?: 0) - up, (link?.traffic?.down ?: 0) - down,
            draftSeconds, of.waitSeconds, of.engineSeconds, aheadNodes, of.aheadUsed, of.aheadHits, of.aheadRounds,
            of.provisional, of.understudy, of.kept, of.rolledBack, of.adopted, of.stalls, of.pauses, of.opens,
            stallSeconds.toList(),
        )
    }
}
