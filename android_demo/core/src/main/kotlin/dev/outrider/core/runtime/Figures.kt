package dev.outrider.core.runtime

/** Collects the figures of one answer while it grows. */
internal class Figures(private val session: Session, private val link: Link?) {
    var draftSeconds = 0.0
    var waitSeconds = 0.0
    var engineSeconds = 0.0
    var aheadNodes = 0
    val stallSeconds = ArrayList<Double>()
    private var aheadUsed = 0
    private var aheadHits = 0
    private var aheadRounds = 0
    private var firstToken = 0.0
    private val began = now()
    private val up = link?.traffic?.up ?: 0
    private val down = link?.traffic?.down ?: 0

    fun committed() {
        if (firstToken == 0.0) firstToken = now() - began
    }

    fun drafted(news: News.TreeDrafted) {
        draftSeconds += news.seconds
        if (session.stats.rounds == 0) return
        aheadRounds++
        if (news.draft.ahead) aheadHits++
        aheadUsed += news.draft.kept
    }

    fun end(): AnswerStats {
        val of = session.stats
        val tokens = session.committed.size - session.prompt.size - of.adopted
        val seconds = now() - began
        return AnswerStats(
            tokens, of.rounds, if (of.rounds > 0) (of.accepted + of.rounds) / of.rounds.toDouble() else 0.0, of.nodes,
            of.calls, of.streamed, seconds, tokens / seconds, firstToken,
            (link?.traffic?.up ?: 0) - up, (link?.traffic?.down ?: 0) - down,
            draftSeconds, waitSeconds, engineSeconds, aheadNodes, aheadUsed, aheadHits, aheadRounds,
            of.provisional, of.kept, of.rolledBack, of.adopted, of.stalls, of.pauses, of.opens, stallSeconds.toList(),
        )
    }
}
