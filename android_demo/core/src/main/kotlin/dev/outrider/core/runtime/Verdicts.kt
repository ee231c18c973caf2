/** What a verdict changes: the one rule for late verdicts, catching up and the normal round. */
package dev.outrider.core.runtime

import dev.outrider.core.protocol.FINISH_NONE
import dev.outrider.core.protocol.Verdict

internal fun Session.verdict(verdict: Verdict, now: Double): List<Action> {
    val flight = flight
    if (flight == null || verdict.seq != flight.seq || verdict.baseLen != committed.size) {
        return emptyList() // of an earlier life of this session
    }
    if (verdict.treeBudget > 0) treeBudget = verdict.treeBudget
    val nodes = flight.tree?.tokens.orEmpty()
    var fresh = verdict.path.mapNotNull(nodes::getOrNull) + verdict.bonus
    val base = committed.size
    val end = fresh.indexOfFirst { it in eosIds }.let { if (it < 0) fresh.size else it + 1 }
    fresh = fresh.take(minOf(end, limit - base))
    count(flight, fresh.size, now)
    val same = text.agreeing(fresh)
    if (policy.onReturn == OnReturn.KEEP && same < minOf(fresh.size, provisional.size)) {
        val actions = addRows(base - 1, verdict.rows, 1 + same) + commit(fresh.take(same))
        return actions + resume() + open(now)
    }
    val actions = addRows(base - 1, verdict.rows) + commit(fresh) + resume()
    return actions + when {
        ended() -> finish(Ending.STOP)
        committed.size >= limit || verdict.finish != FINISH_NONE -> finish(Ending.LENGTH)
        else -> work(now)
    }
}

/** Learn from a verdict's time and content. A GENERATE stays under way: its next token is awaited. */
private fun Session.count(flight: Flight, fresh: Int, now: Double) {
    if (!flight.afterOpen) (if (flight.tree == null) gaps else timer).add(now - flight.sent)
    if (flight.tree == null) {
        stats.streamed += fresh
        this.flight = Flight(flight.seq, null, now, now + gaps.timeout(), false)
        return
    }
    this.flight = null
    if (provisional.isNotEmpty()) {
        stats.catchUpRounds++
    } else {
        stats.rounds++
        stats.accepted += fresh - 1
        stats.nodes += flight.tree.size
    }
}

private fun Session.commit(fresh: List<Int>): List<Action> {
    if (text.agreeing(fresh) < fresh.size) textOver = false // the target draws otherwise, or says more
    version++
    readyTree = null
    return text.commit(fresh)
}

internal fun Session.adopt(): List<Action> {
    val tokens = text.adopt()
    if (tokens.isEmpty()) return emptyList()
    version++
    return listOf(Adopt(tokens)) + resume()
}

private fun Session.resume(): List<Action> {
    if (!alone) return emptyList()
    alone = false
    giveUpAt = null
    if (paused == PauseReason.UNSURE) paused = null
    confidence.clear()
    return listOf(Resume)
}

internal fun Session.addRows(start: Int, data: ByteArray, most: Int = Int.MAX_VALUE) =
    rowsSeen.add(start, data, rowShape, maxContext, most)
