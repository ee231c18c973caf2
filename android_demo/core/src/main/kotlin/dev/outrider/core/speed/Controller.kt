package dev.outrider.core.speed

import dev.outrider.core.protocol.CostCurve
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome

/**
 * What was measured of drafter, link and target, and which arm writes by it: whichever promises most tokens per second,
 * with hysteresis, and now and then another one, to know what it brings. It outlives answers. Seconds throughout.
 * pinned: always this arm; trees and chains are one then.
 *
 * While streaming, the device drafts trees and chains for comparison. While drafting trees, it knows a stream's time
 * per token only from the verifier's curve, which may be wrong, and nothing of chains: so it tries them now and then.
 */
internal class Controller(var pinned: Arm? = null) {
    var costs = CostModel()
        private set
    val tree = TreeArm()
    val chain = ChainArm()
    var stream = StreamArm()
        private set
    var ahead = Ahead()
        private set
    val explorer = Explorer()
    var arm = Arm.TREE
        private set

    /** Steps that are left of a trial, the arm before it, and steps in which another arm promised more. */
    var trial = 0
        private set
    private var home = Arm.TREE
    private var better = 0

    /** Whether the round that ends with the next VERIFY drafts ahead, and the seconds that it took so far. */
    private var ending: Pair<Boolean, Double>? = null

    // --- measurements ---

    /** A handshake took [rtt]. Another verifier has other costs; those of the same one's steps stay. */
    fun linked(welcome: Welcome, rtt: Double) {
        val curve = CostCurve.unpack(welcome.costs)
        val queue = welcome.queueUs / 1e6
        costs.linked(rtt, queue)
        if (curve == null || curve != costs.curve) {
            costs = CostModel(curve, rtt, queue, PRIOR_STEPS * (tree.step ?: 0.0))
            stream = StreamArm()
            ahead = Ahead(ahead.fixed)
            ending = null
        }
        stream.told(welcome.streamTokens / 100.0)
    }

    /** A tree's verdict came after [wait]: [path] was accepted; engine: the verifier's own part of it. */
    fun verified(tree: TokenTree, scores: List<Double>, path: List<Int>, wait: Double, engine: Double) {
        ending = if (engine > 0) ahead.now to maxOf(LEAST_SECONDS, wait) else null
        explorer.passed(wait)
        if (ahead.trial == 0) costs.measured(1 + tree.size, wait, engine)
        this.tree.learn(tree, scores, path)
    }

    /**
     * The verdict on a chain of [tokens] of the understudy came after [wait]: the first [accepted] were right. [ended]:
     * behind them the answer has ended, and nothing is known of the others.
     */
    fun chainVerified(tokens: Int, accepted: Int, wait: Double, engine: Double, ended: Boolean = false) {
        ending = null
        explorer.passed(wait)
        costs.measured(1 + tokens, wait, engine)
        chain.verified(if (ended) accepted else tokens, accepted)
    }

    /**
     * A streamed token came [gap] after the one before it. [sameStep]: it came of one step with the one before, as
     * where the verifier foresees what the text repeats.
     */
    fun streamed(gap: Double, engine: Double, sameStep: Boolean = false) {
        ending = null
        explorer.passed(gap)
        if (!sameStep) costs.stepped(1, engine) // that has told its time
        stream.came(gap, engine, sameStep)
    }

    /** Of a tree drafted in [seconds] for comparison, [path] came true. */
    fun foreseen(tree: TokenTree, scores: List<Double>, path: List<Int>, seconds: Double) {
        this.tree.learn(tree, scores, path)
        if (!ahead.on) costs.exposed = blend(costs.exposed, this.tree.usual(seconds, PRIOR_STEPS))
    }

    /** [exposed] seconds passed between a verdict and the next VERIFY: a round ends. */
    fun waited(exposed: Double) {
        val round = ending
        ending = null
        val usual = maxOf(tree.usual(exposed, PRIOR_STEPS), minOf(exposed, OUTLIER * costs.exposed))
        if (ahead.trial == 0) costs.exposed = blend(costs.exposed, usual)
        if (round != null) ahead.measured(round.first, round.second + usual, explorer)
        else ahead.trial = 0
    }

    /** What passed between a verdict and an answer's first tree, or the first behind a stream, is no round's. */
    fun prepared() {
        ending = null
        ahead.trial = 0
    }

    // --- choices ---

    /**
     * The arm of an answer. [unknown]: nothing tells of it yet; otherwise it goes on, on a new link. There is no
     * hysteresis in either case.
     */
    fun begin(unknown: Boolean = true): Arm {
        if (!unknown) {
            better = EVERY
            return choose()
        }
        val before = if (trial > 0) home else arm
        trial = 0
        better = 0
        tree.tau = tree.usualTau
        stream.first = stream.usual
        arm = best(allowed(), before, margin = 1.0)
        return arm
    }

    /** After every verdict, a step. */
    fun choose(): Arm {
        val rates = allowed()
        if (trial > 0) {
            if (--trial == 0) switch(best(rates, home))
            return arm
        }
        val other = best(rates, arm)
        // a delayed token is followed by a burst: a stream is not left for a few of them
        better = if (other != arm) better + 1 else 0
        if (better >= if (arm == Arm.STREAM && arm in rates) EVERY else 1) switch(other)
        else if (arm != Arm.STREAM) maybeTry(rates)
        return arm
    }

    /** Whether to draft for [arm] beside the one in use. */
    fun compares(arm: Arm): Boolean {
        if (this.arm == Arm.CHAIN) return explorer.due(arm.name, 0.0, 1.0) // the drafter is idle
        val rates = rates()
        val now = rates[this.arm]
        val other = rates[arm]
        val behind = if (now != null && other != null) now / other else 1.0
        return explorer.due(arm.name, costs.exposed, behind)
    }

    /** Tokens per second of each arm of which anything is known. */
    fun rates(): MutableMap<Arm, Double> {
        val rates = linkedMapOf(Arm.TREE to tree.rate(costs))
        if (chain.ready && chain.most > 1 && chain.token != null) rates[Arm.CHAIN] = chain.best(costs).second
        stream.rate(costs)?.let { rates[Arm.STREAM] = it }
        return rates
    }

    private fun allowed(): MutableMap<Arm, Double> {
        val rates = rates()
        if (pinned == Arm.STREAM) return mutableMapOf(Arm.STREAM to (rates[Arm.STREAM] ?: Double.POSITIVE_INFINITY))
        if (pinned != null) rates -= Arm.STREAM
        return rates
    }

    private fun switch(arm: Arm) {
        this.arm = arm
        better = 0
    }

    /** Try one chain, or a stream for a few tokens, if it is due. */
    private fun maybeTry(rates: Map<Arm, Double>) {
        val now = rates.getValue(arm)
        if (arm == Arm.TREE && chain.ready) {
            val chain = rates[Arm.CHAIN] ?: return attempt(Arm.CHAIN, 1)
            val cost = costs.round(1.0) * maxOf(0.0, 1 - chain / now)
            if (explorer.due(Arm.CHAIN.name, cost, now / chain)) return attempt(Arm.CHAIN, 1)
        }
        val stream = rates[Arm.STREAM]
        if (stream == null) {
            if (this.stream.tokens == 0 && pinned == null) attempt(Arm.STREAM, EVERY)
            return
        }
        val cost = costs.round(0.0) - costs.step(0.0) + EVERY * maxOf(0.0, 1 / stream - 1 / now)
        if (explorer.due(Arm.STREAM.name, cost, now / stream)) attempt(Arm.STREAM, EVERY)
    }

    private fun attempt(arm: Arm, steps: Int) {
        home = this.arm
        trial = steps
        switch(arm)
    }
}
