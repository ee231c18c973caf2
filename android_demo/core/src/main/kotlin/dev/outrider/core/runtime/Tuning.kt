/** What measurements decide for one answer: tree or stream, how large a tree, what to draft besides. */
package dev.outrider.core.runtime

import dev.outrider.core.protocol.MAX_NODES
import dev.outrider.core.protocol.ROOT
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Verdict
import dev.outrider.core.protocol.Welcome

/** The largest trees where no others are asked for: as many nodes as a frame of 256 bytes holds. */
val LARGEST = TreeShape(nodes = 48)

/**
 * Choices of one answer. controller: measurements and mode, which outlive it. Times are handed in.
 *
 * largest: bounds of every tree. shaping: draft and send less where that brings more tokens per second. ahead: draft on
 * while a verdict is awaited; null: where it makes rounds shorter.
 */
class Tuning(
    internal val controller: Controller = Controller(Pace()),
    val largest: TreeShape = LARGEST,
    private val shaping: Boolean = true,
    private val ahead: Boolean? = null,
) {
    private class Comparison(val draft: Draft, val base: Int, val seconds: Double)

    private val pace = controller.pace
    private var verdictAt: Double? = null // of the last one, until a tree is sent
    private var behindTree = false // it was on a tree; behind others, the drafter reads what is new to it
    private var comparison: Comparison? = null // whose outcome is not known yet
    private var drafting = false // a tree for comparison is under way
    private var beside = false // one was since the last token
    private var untold = true // nothing of what trees bring in this answer is known but from others

    init {
        pace.ahead.fixed = ahead != null
    }

    // --- what was measured ---

    /** A handshake took [rtt] seconds. */
    internal fun linked(welcome: Welcome, rtt: Double) = pace.linked(welcome, rtt)

    /** Drafting [draft] took the drafter [seconds]. Before a first tree it had something to read. */
    internal fun drafted(draft: Draft, seconds: Double, stats: SessionStats) {
        pace.drafted(seconds, draft.steps, behindTree && !draft.ahead)
        if (stats.rounds == 0) return
        stats.aheadRounds++
        if (draft.ahead) stats.aheadHits++
        stats.aheadUsed += draft.kept
    }

    /** A drafted tree was sent: since the last verdict, reading and drafting was all that happened. */
    internal fun asked(now: Double) {
        verdictAt?.let { if (behindTree) pace.waited(now - it) else pace.prepared(now - it) }
        verdictAt = null // one that is sent again, behind an outage, tells nothing
    }

    /** [verdict] on [flight] came. overdue: it had been given up; an outage says nothing of the link. */
    internal fun answered(flight: Flight, verdict: Verdict, now: Double, overdue: Boolean, stats: SessionStats) {
        val engine = 1e-6 * verdict.engineUs
        val wait = now - flight.sent
        verdictAt = now
        behindTree = false
        if (flight.tree == null) {
            if (!flight.streaming) return // the first token had to be asked for
            pace.streamed(wait, engine, overdue, beside)
            beside = drafting
        } else if (!flight.catchingUp && !flight.afterOpen) {
            stats.waitSeconds += wait
            stats.engineSeconds += engine
            untold = false
            behindTree = true
            val queue = 1e-6 * verdict.queueUs
            if (!overdue) pace.verified(flight.tree, flight.scores, verdict.path, wait, engine, queue)
        }
    }

    /** A tree for comparison is ready, below the first [base] tokens; drafting it took [seconds]. */
    internal fun compared(draft: Draft, base: Int, seconds: Double) {
        comparison = Comparison(draft, base, seconds)
        drafting = false
    }

    /** The text is [tokens] now. What came of the tree for comparison is measured once it is known. */
    internal fun committed(tokens: List<Int>) {
        val waiting = comparison ?: return
        val draft = worthSending(waiting.draft)
        val path = foreseen(draft.tree, tokens.drop(waiting.base)) ?: return
        pace.foreseen(draft.tree, draft.scores, path, waiting.seconds)
        comparison = null
    }

    // --- what follows ---

    /** The mode of an answer, or of its rest on a new link. */
    internal fun begin(): Mode = controller.begin(untold)

    /** The mode after a verdict. */
    internal fun choose(): Mode = controller.choose()

    /** Bounds of the next tree, where the session has room for [nodes] and [depth] levels. */
    internal fun treeSize(nodes: Int, depth: Int): TreeSize {
        val most = minOf(largest.nodes, nodes)
        val levels = minOf(largest.depth, depth)
        return if (shaping) TreeSize(minOf(most, pace.worthDrafting()), levels, pace.gain()) else TreeSize(most, levels)
    }

    /** What of a draft is sent. */
    internal fun worthSending(draft: Draft): Draft {
        val count = if (shaping) pace.worthSending(draft.tree, draft.scores) else draft.tree.size
        val tree = draft.tree.pruned(count, MAX_NODES)
        return draft.copy(tree = tree, scores = draft.scores.take(tree.size))
    }

    /** Whether to draft on while a verdict is awaited. */
    internal fun draftsAhead(): Boolean = ahead ?: pace.draftsAhead()

    /**
     * [streamed] tokens into an answer's streams: a tree to draft below [tokens] now and then, so that tau stays known.
     * Where the mode is pinned, nobody wants to know it.
     */
    internal fun comparison(tokens: List<Int>, streamed: Int): List<Action> {
        if (controller.pinned != null || !pace.compares(streamed, untold)) return emptyList()
        untold = false
        drafting = true
        beside = true
        return listOf(Compare(tokens.toList(), treeSize(MAX_NODES, largest.depth)))
    }
}

/** The path of [tree] that [tokens], below its root, took; null while they have not left it. */
internal fun foreseen(tree: TokenTree, tokens: List<Int>): List<Int>? {
    val path = mutableListOf<Int>()
    for (token in tokens) path += tree.child(path.lastOrNull() ?: ROOT, token) ?: return path
    return null
}
