/**
 * One answer's part in the choices: what is measured of it goes to the controller, which keeps and weighs it; by that,
 * the tree's size and what else to draft are chosen.
 */
package dev.outrider.core.session

import dev.outrider.core.drafting.Draft
import dev.outrider.core.drafting.TreeShape
import dev.outrider.core.protocol.MAX_NODES
import dev.outrider.core.speed.Arm
import dev.outrider.core.speed.Controller
import dev.outrider.core.speed.FIRST_TOKENS
import dev.outrider.core.speed.MOST_TOKENS

/** The largest trees where no others are asked for: as many nodes as a frame of 256 bytes holds. */
internal val LARGEST = TreeShape(nodes = 48)

/** Nodes and levels of a tree, at most. gain: as of [TreeShape]; null: that of the largest. */
internal data class TreeSize(val nodes: Int, val depth: Int, val gain: Double? = null)

/**
 * Choices of one answer. controller: measurements and arm, which outlive it. Times are handed in.
 *
 * largest: bounds of every tree. shaping: draft and send less where that brings more tokens per second. ahead: draft on
 * while a verdict is awaited; null: where it makes rounds shorter.
 */
internal class Tuning(
    internal val controller: Controller = Controller(),
    val largest: TreeShape = LARGEST,
    private val shaping: Boolean = true,
    private val ahead: Boolean? = null,
) {
    /** A tree or a chain for comparison alone, below the first [base] tokens; drafting it took [seconds]. */
    private class Comparison(val arm: Arm, val draft: Draft, val base: Int, val seconds: Double)

    private var verdictAt: Double? = null // of the last one, until a tree is sent
    private var behindTree = false // it was on a tree; behind others, the drafter reads what is new to it
    private var comparing: Arm? = null // is being drafted for, for comparison
    private var compared: Comparison? = null // whose outcome is not known yet
    private var untold = true // what trees bring in this answer is known from others alone
    private var barren = false // the understudy found nothing to draft in this answer

    init {
        controller.ahead.fixed = ahead != null
        controller.chain.ready = false // it has to read the text first
    }

    // --- what was measured ---

    /**
     * Drafting [draft] took [seconds]. [wanted]: it was not given up. A tree that is not behind another tells nothing
     * of a step: the drafter had to read first.
     */
    internal fun drafted(arm: Arm, draft: Draft, seconds: Double, wanted: Boolean) {
        if (arm == Arm.CHAIN) {
            if (wanted && draft.tree.size == 0) barren = true
            controller.chain.drafted(draft.steps, seconds)
        } else if (behindTree) {
            controller.tree.drafted(seconds, draft.steps)
        }
    }

    /** What was drafted was sent: since the last verdict, reading and drafting was all that happened. */
    internal fun asked(arm: Arm, now: Double) {
        verdictAt?.takeIf { arm == Arm.TREE }?.let {
            if (behindTree) controller.waited(now - it) else controller.prepared()
        }
        verdictAt = null // one that is sent again, behind an outage, tells nothing
    }

    /** A verdict came. One that is late says nothing of the link. */
    internal fun answered(settled: Settled, now: Double) {
        val wait = settled.wait
        val engine = settled.engine
        verdictAt = now
        behindTree = false
        if (settled.drafted) {
            untold = false
            behindTree = settled.arm == Arm.TREE
        }
        if (settled.arm == Arm.STREAM && !settled.askedFor) {
            controller.streamed(wait, engine, settled.sameStep)
        } else if (settled.late) {
            return
        } else if (settled.arm == Arm.STREAM) { // or the text was read first; it waited for nothing
            if (!settled.afterOpen && !settled.sameStep) controller.costs.waited(wait - engine)
        } else if (settled.arm == Arm.CHAIN && settled.drafted) {
            controller.chainVerified(settled.tree.size, settled.accepted.size, wait, engine, settled.ended)
        } else if (settled.drafted) {
            controller.verified(settled.tree, settled.scores, settled.accepted, wait, engine)
        }
    }

    /** What was drafted for comparison, empty if it tells nothing, below the first [base] tokens, in [seconds]. */
    internal fun compared(draft: Draft, base: Int, seconds: Double) {
        val arm = comparing ?: Arm.TREE
        comparing = null
        compared = if (draft.tree.size > 0) Comparison(arm, draft, base, seconds) else null
        if (arm == Arm.CHAIN) controller.chain.drafted(draft.steps, seconds)
    }

    /** The text is [tokens] now. What came of the tree for comparison is measured once it is known. */
    internal fun committed(tokens: List<Int>) {
        val waiting = compared ?: return
        val draft = worthSending(waiting.arm, waiting.draft)
        val path = draft.tree.foreseen(tokens.drop(waiting.base)) ?: return
        if (waiting.arm == Arm.CHAIN) controller.chain.verified(draft.tree.size, path.size)
        else controller.foreseen(draft.tree, draft.scores, path, waiting.seconds)
        compared = null
    }

    /** The understudy drafts nothing more, and not what was asked for. */
    internal fun understudyFailed() {
        controller.chain.ready = false
        if (comparing == Arm.CHAIN) comparing = null
    }

    // --- what follows ---

    /** The arm of an answer, or of its rest on a new link. */
    internal fun begin(): Arm = controller.begin(untold)

    /** The arm after a verdict. [drafts]: the understudy can draft. */
    internal fun choose(drafts: Boolean): Arm {
        offer(drafts)
        return controller.choose()
    }

    /** Bounds of the next tree, where the session has room for [nodes] and [depth] levels. */
    internal fun treeSize(nodes: Int, depth: Int): TreeSize {
        val most = minOf(largest.nodes, nodes)
        val levels = minOf(largest.depth, depth)
        if (!shaping) return TreeSize(most, levels)
        return TreeSize(minOf(most, controller.tree.worthDrafting()), levels, controller.tree.gain(controller.costs))
    }

    /**
     * Tokens of the chain that the understudy is to draft next; 0: the drafter drafts a tree. [limit]: that the
     * verifier takes. [room]: that the session has. [ready]: the understudy can draft. [alone]: there is no
     * drafter. Where nothing is shaped, trees alone are drafted, or chains alone.
     */
    internal fun chain(limit: Int, room: Int, ready: Boolean, alone: Boolean = false): Int {
        offer(ready)
        val chain = controller.chain
        val most = minOf(limit, room)
        chain.most = limit
        if (most < 2) return 0
        if (alone && ready && !shaping && !barren) return minOf(most, largest.depth, MOST_TOKENS)
        if (!chain.ready || controller.arm != Arm.CHAIN) return 0
        return minOf(most, if (controller.trial > 0) FIRST_TOKENS else chain.best(controller.costs).first)
    }

    /** Chains are possible, or not. [ready]: the understudy can draft. */
    private fun offer(ready: Boolean) {
        controller.chain.ready = ready && shaping && !barren
    }

    /** What of a draft is sent. */
    internal fun worthSending(arm: Arm, draft: Draft): Draft {
        if (arm == Arm.CHAIN) return draft
        val trees = controller.tree
        val count = if (shaping) trees.worthSending(draft.tree, draft.scores, controller.costs) else draft.tree.size
        val tree = draft.tree.pruned(count, MAX_NODES)
        return draft.copy(tree = tree, scores = draft.scores.take(tree.size))
    }

    /** Whether to draft on while a verdict is awaited: on a chain of the understudy, that costs the drafter nothing. */
    internal fun draftsAhead(arm: Arm): Boolean = ahead ?: (arm == Arm.CHAIN || controller.ahead.now)

    /**
     * What to draft for comparison beside a stream or a chain now, if anything, and its size. Where the arm is pinned,
     * nothing needs to know it. [drafts]: the understudy can draft.
     */
    internal fun comparison(drafts: Boolean = false): List<Pair<Arm, TreeSize>> {
        if (controller.pinned != null || comparing != null || controller.arm == Arm.TREE) return emptyList()
        offer(drafts)
        if (controller.arm == Arm.STREAM && controller.chain.ready && controller.compares(Arm.CHAIN)) {
            comparing = Arm.CHAIN
            return listOf(Arm.CHAIN to TreeSize(FIRST_TOKENS, FIRST_TOKENS))
        }
        if (!controller.compares(Arm.TREE)) return emptyList()
        comparing = Arm.TREE
        untold = false
        return listOf(Arm.TREE to treeSize(MAX_NODES, largest.depth))
    }
}
