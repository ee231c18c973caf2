/** What a session can do next: ask the target, ask the drafter for a tree, or let it write alone. */
package dev.outrider.core.runtime

import dev.outrider.core.protocol.Generate
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Verify
import dev.outrider.core.protocol.packIds
import dev.outrider.core.protocol.packParents

/** Tokens over which the drafter's confidence is averaged. */
private const val CONFIDENCE_WINDOW = 8

/** Whatever can be done next: ask the target, ask for a tree, or write alone. */
internal fun Session.work(now: Double): List<Action> {
    if (finished != null) return emptyList()
    val canAsk = linked && flight == null && retryAt == null
    val tree = readyTree
    if (canAsk && provisional.isNotEmpty()) {
        return verify(TokenTree.chain(provisional.take(maxNodes)), now) + write(now)
    }
    if (writesFirst()) return write(now)
    if (canAsk && mode == Mode.STREAM) return generate(now)
    if (canAsk && tree != null) {
        readyTree = null
        // it may have been drafted before the verifier's limits were known
        return verify(tree.pruned(maxNodes, room()), now) + ahead()
    }
    // the first token waits for no tree: the prompt's step draws it
    if (canAsk && mode == Mode.TREE && seq == 0L) return verify(TokenTree(), now)
    if (alone) {
        val written = write(now)
        if (written.isNotEmpty() || !canAsk) return written
    }
    if (busy || readyTree != null || flight != null || mode != Mode.TREE) return emptyList()
    busy = true
    return listOf(DraftTree(committed.toList(), version, minOf(maxNodes, treeBudget), room()))
}

/** The drafter writes without waiting for the target. */
private fun Session.writesFirst() =
    (policy.writer == Writer.PREFER_DEVICE || policy.writer == Writer.DEVICE_ONLY) && paused == null

/** Levels a tree may have; the bonus token takes the last place. */
private fun Session.room() = limit - committed.size - 1

private fun Session.verify(tree: TokenTree, now: Double): List<Action> {
    fly(tree, now)
    return listOf(Send(Verify(stream, seq, committed.size, packIds(tree.tokens), packParents(tree))))
}

private fun Session.generate(now: Double): List<Action> {
    fly(null, now)
    return listOf(Send(Generate(stream, seq, committed.size, limit - committed.size, rows = true)))
}

private fun Session.fly(tree: TokenTree?, now: Double) {
    seq++
    stats.calls++
    val wait = if (freshOpen) maxOf(timer.timeout(), patience.open) else timer.timeout()
    flight = Flight(seq, tree, now, now + wait, freshOpen)
    freshOpen = false
}

/** The drafter has nothing to do until the verdict. */
private fun Session.ahead(): List<Action> = if (busy) emptyList() else listOf(DraftAhead(version))

internal fun Session.mayWrite() = when {
    paused != null || policy.writer == Writer.CLOUD_ONLY -> false
    policy.writer == Writer.PREFER_DEVICE && !alone -> provisional.size < policy.lead
    else -> alone
}

/** Ask for one more provisional token, where one may be written and the answer is not full. */
internal fun Session.write(now: Double): List<Action> {
    val canGoOn = mayWrite() && !full()
    if (alone && !canGoOn) {
        giveUpAt = giveUpAt ?: (now + patience.offline)
        if (policy.writer == Writer.DEVICE_ONLY && paused == null) return finish(Ending.UNVERIFIED)
    }
    if (busy || !canGoOn) return emptyList()
    busy = true
    return listOf(WriteToken(text.all(), version))
}

/** Pause where the drafter has become unsure and the policy says so. */
internal fun Session.weigh(sure: Double): List<Action> {
    confidence.addLast(sure)
    if (confidence.size > CONFIDENCE_WINDOW) confidence.removeFirst()
    val unsure = confidence.size == CONFIDENCE_WINDOW && confidence.average() < policy.minConfidence
    return if (unsure && policy.offline == Offline.PAUSE) listOf(pauseFor(PauseReason.UNSURE)) else emptyList()
}

/** The text, provisional part included, is at its end. */
private fun Session.full() = textOver || provisional.lastOrNull() in eosIds || text.size >= limit || text.looping
