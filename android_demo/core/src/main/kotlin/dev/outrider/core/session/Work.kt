/** What a session can do next: ask the target, ask for a tree, or write alone. */
package dev.outrider.core.session

import dev.outrider.core.drafting.Draft
import dev.outrider.core.protocol.TokenTree

/** Whatever can be done next: ask the target, ask for a tree, or write alone. */
internal fun Session.work(now: Double): List<Action> {
    if (finished != null) return emptyList()
    val canAsk = linked && !refused && flight == null && deadlines.retry == null
    val tree = ready
    if (canAsk && provisional.isNotEmpty()) return listOf(verifyChain(now)) + write(now)
    if (solo.writesFirst) return write(now)
    if (canAsk && mode == Mode.STREAM) {
        return listOf(requests.generate(committed.size, text.limit - committed.size, now))
    }
    if (canAsk && tree != null) {
        return listOf(verifyTree(tree, now)) + if (busy == null) listOf(DraftAhead(version)) else emptyList()
    }
    // the first token waits for no tree: the prompt's step draws it
    if (canAsk && requests.seq == 0L) return listOf(verifyTree(Draft(), now))
    if (alone) {
        val written = write(now)
        if (written.isNotEmpty() || !canAsk) return written
    }
    if (busy != null || ready != null || flight != null || mode != Mode.TREE) return emptyList()
    val chain = tuning.chain(minOf(maxNodes, treeBudget), text.room, handover.drafts)
    if (chain > 0) {
        busy = Writer.UNDERSTUDY
        return listOf(DraftChain(handover.readToDraft(committed), version, chain)) + tuning.besideChain(committed)
    }
    busy = Writer.DRAFTER
    val size = tuning.treeSize(minOf(maxNodes, treeBudget), text.room)
    return listOf(DraftTree(committed.toList(), version, size))
}

private fun Session.verifyTree(draft: Draft, now: Double): Send {
    ready = null
    tuning.asked(now, draft.chain)
    val tree = draft.tree.pruned(maxNodes, text.room) // it may be older than the verifier's limits
    return requests.verify(tree, committed.size, now, draft.scores, chain = draft.chain)
}

/** Catch up: have the provisional text verified. */
private fun Session.verifyChain(now: Double): Send {
    val levels = minOf(maxNodes, context - committed.size).coerceAtLeast(0)
    return requests.verify(TokenTree.chain(provisional.take(levels)), committed.size, now, catchingUp = true)
}
