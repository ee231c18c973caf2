/** What the device measured of drafter, link and target, and each arm's tokens per second by it. Seconds throughout. */
package dev.outrider.core.speed

import dev.outrider.core.protocol.CostCurve
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome

/** Measurements of one verifier, its link and the drafter; they outlive answers. */
internal class Pace {
    var costs = CostModel()
        private set
    val tree = TreeArm()
    val chain = ChainArm()
    var stream = StreamArm()
        private set
    var ahead = Ahead()
        private set
    val explorer = Explorer()

    /** Whether the round that ends with the next VERIFY drafts ahead, and the seconds that it took so far. */
    private var ending: Pair<Boolean, Double>? = null

    /** A handshake took [rtt]. Another verifier has other costs; what was measured of the same one stays. */
    fun linked(welcome: Welcome, rtt: Double) {
        val curve = CostCurve.unpack(welcome.costs)
        costs.rtt = rtt
        if (!costs.isOf(curve)) {
            costs = CostModel(curve, rtt, welcome.queueUs / 1e6, PRIOR_STEPS * (tree.step ?: 0.0))
            stream = StreamArm()
            ahead = Ahead(ahead.fixed)
            ending = null
        }
        stream.told(welcome.streamTokens / 100.0)
    }

    /** A tree's verdict came after [wait]: [path] was accepted; engine, queue: the verifier's own part of it. */
    fun verified(
        tree: TokenTree, scores: List<Double>, path: List<Int>, wait: Double, engine: Double, queue: Double,
    ) {
        ending = if (engine > 0) ahead.now to maxOf(LEAST_SECONDS, wait - queue) else null
        if (ahead.trial == 0) round(1 + tree.size, wait, engine, queue)
        explorer.passed(wait)
        this.tree.learn(tree, scores, path)
    }

    /**
     * The verdict on a chain of [tokens] of the understudy came after [wait]: the first [accepted] were right. [ended]:
     * behind them the answer has ended, and nothing is known of the others.
     */
    fun chainVerified(
        tokens: Int, accepted: Int, wait: Double, engine: Double, queue: Double, ended: Boolean = false,
    ) {
        ending = null
        round(1 + tokens, wait, engine, queue)
        explorer.passed(wait)
        chain.verified(if (ended) accepted else tokens, accepted)
    }

    /**
     * A streamed token came [gap] after the one before it. [sameStep]: it came of one step with the one before, as
     * where the verifier foresees what the text repeats.
     */
    fun streamed(gap: Double, engine: Double, overdue: Boolean, sameStep: Boolean = false) {
        ending = null
        if (!sameStep) costs.stepped(1, engine) // that has told its time
        if (!overdue) explorer.passed(gap)
        stream.came(gap, engine, overdue, sameStep)
    }

    /** Of a tree drafted in [seconds] for comparison, [path] came true. */
    fun foreseen(tree: TokenTree, scores: List<Double>, path: List<Int>, seconds: Double) {
        this.tree.learn(tree, scores, path)
        if (!ahead.on) costs.exposed = blend(costs.exposed, seconds)
    }

    /** What passed between a verdict and an answer's first tree, or the first behind a stream, is no round's. */
    fun prepared() {
        ending = null
        ahead.trial = 0
    }

    /** [exposed] seconds passed between a verdict and the next VERIFY: a round ends. */
    fun waited(exposed: Double) {
        if (ahead.trial == 0) costs.exposed = blend(costs.exposed, exposed)
        val (drafted, seconds) = ending ?: return prepared()
        ending = null
        ahead.measured(drafted, seconds + exposed, explorer)
    }

    /** A new answer begins, of which nothing is known. */
    fun forgetAnswer() {
        tree.tau = tree.usualTau
        stream.first = stream.usual
    }

    private fun round(tokens: Int, wait: Double, engine: Double, queue: Double) {
        costs.stepped(tokens, engine)
        costs.rtt = blend(costs.rtt, maxOf(0.0, wait - engine - queue))
        costs.waited(queue)
    }

    /** Tokens per second of each arm of which anything is known. */
    fun rates(): MutableMap<Arm, Double> {
        val rates = linkedMapOf(Arm.TREE to tree.rate(costs))
        if (chain.known) rates[Arm.CHAIN] = chain.best(costs).second
        stream.rate(costs)?.let { rates[Arm.STREAM] = it }
        return rates
    }
}
