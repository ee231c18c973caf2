/** What a verdict does to an answer: commit, confirm or roll back, measure, and choose how to go on. */
package dev.outrider.core.session

import dev.outrider.core.protocol.FINISH_NONE
import dev.outrider.core.protocol.Verdict

/** The accepted path and the bonus token are the target's; see [Session] for the rule. */
internal fun Session.verdict(verdict: Verdict, now: Double): List<Action> {
    val flight = flight
    val base = committed.size
    if (flight == null || verdict.seq != flight.seq || verdict.baseLen != base) {
        return emptyList() // stale: its request was given up
    }
    tuning.answered(flight, verdict, now, alone, stats)
    requests.answered(flight, verdict, now)
    complaint = ""
    if (verdict.treeBudget > 0) treeBudget = verdict.treeBudget
    val nodes = flight.tree?.tokens.orEmpty()
    val fresh = text.within(verdict.path.mapNotNull(nodes::getOrNull) + verdict.bonus)
    stats.count(flight.tree?.size, fresh.size, provisional.isNotEmpty(), flight.chain)
    val same = text.agreeing(fresh)
    if (policy.onReturn == OnReturn.KEEP && same < minOf(fresh.size, provisional.size)) {
        val rows = rowsOf(verdict, base + same)
        val actions = rows + commit(fresh.take(same)) + resume() + open(now)
        return actions + choose(now)
    }
    val actions = rowsOf(verdict, base + verdict.path.size) + commit(fresh) + resume()
    if (text.over || verdict.finish != FINISH_NONE) {
        return actions + finish(if (text.ended) FinishReason.STOP else FinishReason.LENGTH)
    }
    val streaming = targetFirst && this.flight != null
    val compare = if (streaming) tuning.comparison(committed, stats.streamed, handover.drafts) else emptyList()
    return actions + compare + choose(now) + work(now)
}

/** Those of its rows that lie before position [end]: a verdict's rows end with that of its last accepted token. */
private fun Session.rowsOf(verdict: Verdict, end: Int): List<Action> {
    val start = committed.size + verdict.path.size - verdict.rows.size / rowShape.bytes
    return addRows(start, verdict.rows, maxOf(0, end - start))
}

/** Tree or stream from here on. */
private fun Session.choose(now: Double): List<Action> =
    if (finished != null || !targetFirst) emptyList() else changeMode(tuning.choose(handover.drafts), now)

private fun Session.commit(fresh: List<Int>): List<Action> {
    version++
    ready = null
    val actions = (if (fresh.isEmpty()) emptyList() else arithmetic.pin()) + text.commit(fresh)
    tuning.committed(committed)
    return actions + handover.readAlong(committed)
}

internal fun Session.adopt(): List<Action> {
    val tokens = text.adopt()
    if (tokens.isEmpty()) return emptyList()
    version++
    return listOf(Adopt(tokens)) + resume()
}

private fun Session.resume(): List<Action> {
    if (!alone) return emptyList()
    deadlines.giveUp = null
    solo.targetIsBack()
    handover.targetIsBack()
    return listOf(Resume)
}

internal fun Session.addRows(start: Int, data: ByteArray, most: Int = Int.MAX_VALUE) =
    rowsSeen.add(start, data, rowShape, maxContext, most)
