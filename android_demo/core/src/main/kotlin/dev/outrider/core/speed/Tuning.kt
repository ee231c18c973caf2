/** Choices for one answer, made from measurements: tree or stream, the tree's size, what else to draft. */
package dev.outrider.core.speed

import dev.outrider.core.drafting.Draft
import dev.outrider.core.drafting.TreeShape
import dev.outrider.core.protocol.MAX_NODES
import dev.outrider.core.protocol.ROOT
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome

/** The largest trees where no others are asked for: as many nodes as a frame of 256 bytes holds. */
internal val LARGEST = TreeShape(nodes = 48)

/** What is to be drafted. */
internal sealed interface DraftSize

/** Nodes and levels of a tree, at most. gain: as of [TreeShape]; null: that of the largest. */
internal data class TreeSize(val nodes: Int, val depth: Int, val gain: Double? = null) : DraftSize

/** Tokens of a chain of the understudy, at most. */
internal data class ChainSize(val tokens: Int) : DraftSize

/**
 * Choices of one answer. controller: measurements and mode, which outlive it. Times are handed in.
 *
 * largest: bounds of every tree. shaping: draft and send less where that brings more tokens per second. ahead: draft on
 * while a verdict is awaited; null: where it makes rounds shorter.
 */
internal class Tuning(
    internal val controller: Controller = Controller(Pace()),
    val largest: TreeShape = LARGEST,
    private val shaping: Boolean = true,
    private val ahead: Boolean? = null,
) {
    /** A tree or a chain for comparison alone, below the first [base] tokens; drafting it took [seconds]. */
    private class Comparison(val draft: Draft, val base: Int, val seconds: Double)

    private val pace = controller.pace
    private var verdictAt: Double? = null // of the last one, until a tree is sent
    private var behindTree = false // it was on a tree; behind others, the drafter reads what is new to it
    private var comparison: Comparison? = null // whose outcome is not known yet
    private var drafting = false // a tree for comparison is under way
    private var beside = false // one was since the last token
    private var untold = true // nothing of what trees bring in this answer is known but from others
    private var chained = false // the last tree was the understudy's chain
    private var chainNext = true // that is what is to be compared next, if it can be
    private var comparingChain = false // one for comparison is under way
    private var barren = false // the understudy found nothing to draft in this answer

    init {
        pace.ahead.fixed = ahead != null
        pace.chains.ready = false
    }

    // --- what was measured ---

    /** A handshake took [rtt] seconds. */
    internal fun linked(welcome: Welcome, rtt: Double) = pace.linked(welcome, rtt)

    /**
     * Drafting [draft] took [seconds]. Before a first tree the drafter had something to read. [wanted]: it was not
     * given up.
     */
    internal fun drafted(draft: Draft, seconds: Double, wanted: Boolean) {
        if (draft.chain) {
            if (wanted && draft.tree.size == 0) barren = true
            pace.chains.drafted(draft.steps, seconds)
        } else {
            pace.drafted(seconds, draft.steps, behindTree && !draft.ahead)
        }
    }

    /** A drafted tree was sent: since the last verdict, reading and drafting was all that happened. */
    internal fun asked(now: Double, chain: Boolean = false) {
        verdictAt?.takeUnless { chain }?.let { if (behindTree) pace.waited(now - it) else pace.prepared(now - it) }
        verdictAt = null // one that is sent again, behind an outage, tells nothing
    }

    /** A verdict came. One that is late says nothing of the link. */
    internal fun answered(settled: Settled, now: Double) {
        val wait = settled.wait
        val engine = settled.engine
        verdictAt = now
        behindTree = false
        if (settled.kind == RequestKind.STREAM) {
            // the first token had to be asked for; those of its step say nothing without it
            val running = settled.clock == StreamClock.RUNNING
            if (settled.clock == StreamClock.SILENT || (settled.sameStep && !running)) return
            pace.streamed(wait, engine, settled.late, beside, settled.sameStep)
            beside = drafting
        } else if (settled.drafted) {
            untold = false
            behindTree = settled.kind == RequestKind.TREE
            if (settled.late) return
            val accepted = settled.accepted
            if (behindTree) pace.verified(settled.tree, settled.scores, accepted, wait, engine, settled.queue)
            else pace.chainVerified(settled.tree.size, accepted.size, wait, engine, settled.queue, settled.ended)
        }
    }

    /** A tree for comparison, empty if it tells nothing, below the first [base] tokens; drafting it took [seconds]. */
    internal fun compared(draft: Draft, base: Int, seconds: Double) {
        comparison = if (draft.chain || draft.tree.size > 0) Comparison(draft, base, seconds) else null
        drafting = false
        comparingChain = false
        if (draft.chain) pace.chains.drafted(draft.steps, seconds)
    }

    /** The text is [tokens] now. What came of the tree for comparison is measured once it is known. */
    internal fun committed(tokens: List<Int>) {
        val waiting = comparison ?: return
        val draft = worthSending(waiting.draft)
        val path = foreseen(draft.tree, tokens.drop(waiting.base)) ?: return
        if (draft.chain) pace.chains.verified(draft.tree.size, path.size)
        else pace.foreseen(draft.tree, draft.scores, path, waiting.seconds)
        comparison = null
    }

    /** The understudy drafts nothing more, and not what was asked for. */
    internal fun understudyFailed() {
        pace.chains.ready = false
        if (comparingChain) drafting = false
        comparingChain = false
    }

    // --- what follows ---

    /** The mode of an answer, or of its rest on a new link. */
    internal fun begin(): Mode = controller.begin(untold)

    /** The mode after a verdict. [drafts]: the understudy can draft. */
    internal fun choose(drafts: Boolean): Mode {
        offer(drafts)
        return controller.choose()
    }

    /** Bounds of the next tree, where the session has room for [nodes] and [depth] levels. */
    internal fun treeSize(nodes: Int, depth: Int): TreeSize {
        val most = minOf(largest.nodes, nodes)
        val levels = minOf(largest.depth, depth)
        return if (shaping) TreeSize(minOf(most, pace.worthDrafting()), levels, pace.gain()) else TreeSize(most, levels)
    }

    /**
     * Tokens of the chain that the understudy is to draft next; 0: the drafter drafts a tree. [limit]: that the
     * verifier takes. [room]: that the session has. [ready]: the understudy can draft. [alone]: there is no
     * drafter. Where nothing is shaped, trees alone are drafted, or chains alone.
     */
    internal fun chain(limit: Int, room: Int, ready: Boolean, alone: Boolean = false): Int {
        offer(ready)
        pace.chains.most = limit
        var length = if (minOf(limit, room) > 1) minOf(limit, room, pace.chain(chained)) else 0
        if (alone && ready && !shaping && !barren) length = minOf(minOf(limit, room), largest.depth, MOST_TOKENS)
        chained = length > 0
        return length
    }

    /** Chains are possible, or not. [ready]: the understudy can draft. */
    private fun offer(ready: Boolean) {
        pace.chains.ready = ready && shaping && !barren
    }

    /** A chain is drafted: now and then a tree too, of this size, so that what trees bring stays known. */
    internal fun besideChain(): TreeSize? {
        if (comparison != null || drafting || !pace.chains.compares()) return null
        drafting = true
        return treeSize(MAX_NODES, largest.depth)
    }

    /** What of a draft is sent. */
    internal fun worthSending(draft: Draft): Draft {
        if (draft.chain) return draft
        val count = if (shaping) pace.worthSending(draft.tree, draft.scores) else draft.tree.size
        val tree = draft.tree.pruned(count, MAX_NODES)
        return draft.copy(tree = tree, scores = draft.scores.take(tree.size))
    }

    /**
     * Whether to draft on while a verdict is awaited. [chain]: on one of the understudy, which costs the drafter
     * nothing.
     */
    internal fun draftsAhead(chain: Boolean = false): Boolean = ahead ?: (chain || pace.draftsAhead())

    /**
     * [streamed] tokens into an answer's streams: what to draft beside them now and then, so that tau stays known.
     * Where the mode is pinned, nothing needs to know it. [drafts]: the understudy can draft; every second comparison
     * is a chain of its then.
     */
    internal fun comparison(streamed: Int, drafts: Boolean = false): DraftSize? {
        if (controller.pinned != null || !pace.compares(streamed, untold)) return null
        drafting = true
        beside = true
        offer(drafts)
        if (pace.chains.ready && chainNext) {
            chainNext = false
            comparingChain = true
            return ChainSize(FIRST_TOKENS)
        }
        chainNext = true
        untold = false
        return treeSize(MAX_NODES, largest.depth)
    }
}

/** The path of [tree] that [tokens], below its root, took; null while they have not left it. */
internal fun foreseen(tree: TokenTree, tokens: List<Int>): List<Int>? {
    val path = mutableListOf<Int>()
    for (token in tokens) path += tree.child(path.lastOrNull() ?: ROOT, token) ?: return path
    return null
}
