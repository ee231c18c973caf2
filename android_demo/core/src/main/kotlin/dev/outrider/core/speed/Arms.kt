/**
 * What each arm brings: tokens per second by what is known of it and by the cost model. Seconds and tokens.
 *
 * A round of trees commits 1 + (sum of the sent nodes' acceptance probabilities) tokens. A chain of k tokens, each
 * right with probability a, commits (1 - a^(k+1)) / (1 - a). A stream commits one token per step, or several by lookup.
 */
package dev.outrider.core.speed

import dev.outrider.core.protocol.TokenTree
import kotlin.math.ceil
import kotlin.math.exp
import kotlin.math.pow

/** What an older observation still counts after one more. */
private const val FADING = 0.98

/** Levels of a tree that are calibrated separately; deeper ones count as the last. */
private const val DEPTHS = 6

/** Weight in what is usual of a streamed token: one says less than a round. */
private const val USUAL_TOKEN = 0.01

/** Weight of what a tree's nodes promised in the tokens that it is taken to bring, next to those that came true. */
private const val PROMISED = 0.7

/** Tokens that a round of trees is taken to bring before one was seen, and drafting steps that it takes. */
private const val PRIOR_TAU = 3.0
internal const val PRIOR_STEPS = 4

/** Tokens that a step of a stream is taken to bring if the verifier does not know. */
private const val PRIOR_STREAM = 1.25

/** Nodes that are drafted in any case, and nodes drafted per node that was worth sending in earlier trees. */
private const val LEAST_NODES = 16
private const val SPARE = 2

/**
 * Tokens of a chain at most, and of the first, by which chains are known; how likely a token is taken to be right at
 * first, and at most.
 */
internal const val MOST_TOKENS = 16
internal const val FIRST_TOKENS = 4
private const val PRIOR_RIGHT = 0.7
private const val MOST_RIGHT = 0.99

/** How the device uses the target: to verify a drafter's trees, or an understudy's chains; to write alone. */
internal enum class Arm { TREE, CHAIN, STREAM }

/** Trees of the drafter. */
internal class TreeArm {
    /** Tokens of a round in this answer; in the answers so far, by so many [trees]. */
    var tau = PRIOR_TAU
    var usualTau = PRIOR_TAU
        private set
    private var trees = 0

    /** Seconds of a drafting step. */
    var step: Double? = null

    /** Accepted nodes by depth: as the drafter predicted them, and as they came. */
    private val predicted = DoubleArray(DEPTHS + 1) { 1.0 }
    private val accepted = DoubleArray(DEPTHS + 1) { 1.0 }

    /** Of a tree. */
    var nodes = LEAST_NODES.toDouble()
        private set

    /** A tree was drafted. */
    fun drafted(seconds: Double, steps: Int) {
        if (steps > 0) step = blend(step, usual(seconds, steps) / steps)
    }

    /** Of [seconds] that drafting in [steps] steps took, those that say something of the next round. */
    fun usual(seconds: Double, steps: Int): Double =
        step?.takeIf { it > 0 }?.let { minOf(seconds, OUTLIER * steps * it) } ?: seconds

    /** Of [tree], [path] came true. tau is what its nodes promise, calibrated: that varies less than luck. */
    fun learn(tree: TokenTree, scores: List<Double>, path: List<Int>) {
        nodes = blend(nodes.takeIf { trees > 0 }, tree.size.toDouble())
        trees++
        var tokens = 1.0 + path.size
        if (scores.isNotEmpty() && scores.size == tree.size) {
            for (known in listOf(predicted, accepted)) {
                for (depth in known.indices) known[depth] = 1 + FADING * (known[depth] - 1)
            }
            for ((node, score) in scores.withIndex()) predicted[minOf(tree.depths[node], DEPTHS)] += exp(score)
            for (depth in 1..path.size) accepted[minOf(depth, DEPTHS)] += 1.0
            tokens += PROMISED * (expected(tree, scores).last() - tokens)
        }
        tau = blend(tau, tokens, maxOf(SMOOTHING, 1.0 / (1 + trees)))
        usualTau = blend(usualTau, tokens, maxOf(USUAL, 1.0 / (1 + trees)))
    }

    /** Tokens that the first 1, 2, ... nodes of [tree] promise, as far as promises were kept so far. */
    private fun expected(tree: TokenTree, scores: List<Double>): List<Double> {
        var tokens = 1.0
        return scores.mapIndexed { node, score ->
            val depth = minOf(tree.depths[node], DEPTHS)
            tokens += minOf(1.0, exp(score) * (accepted[depth] / predicted[depth]))
            tokens
        }
    }

    fun rate(costs: CostModel): Double = tau / costs.round(nodes)

    /** Accepted tokens that one more drafting step must promise to be worth its time; null: nothing tells. */
    fun gain(costs: CostModel): Double? = step?.let { rate(costs) * it }

    /** Nodes to draft of the next tree, so that there is a choice of what to send. */
    fun worthDrafting(): Int = maxOf(LEAST_NODES, ceil(SPARE * nodes).toInt())

    /** How many nodes of [tree], best first, make most tokens per second; [scores]: log path probabilities. */
    fun worthSending(tree: TokenTree, scores: List<Double>, costs: CostModel): Int {
        if (scores.isEmpty()) return tree.size
        val tokens = expected(tree, scores)
        return (1..tree.size).maxBy { tokens[it - 1] / costs.round(it.toDouble()) }
    }
}

/**
 * Chains of tokens that the understudy drafts. While one is verified the understudy continues: it guesses the target's
 * next token, and drafts behind it. If all of the chain was right, and so was the guess, that is kept.
 */
internal class ChainArm {
    /** The understudy has read along, and may draft. */
    var ready = false

    /** Tokens that the verifier takes at most. */
    var most = MOST_TOKENS

    /** Seconds that the understudy takes for one; null: it has drafted none yet. */
    var token: Double? = null
        private set
    private var right = PRIOR * PRIOR_RIGHT
    private var judged = PRIOR

    /** [tokens] were drafted in [seconds]. */
    fun drafted(tokens: Int, seconds: Double) {
        if (tokens > 0) token = blend(token, seconds / tokens)
    }

    /** Of a chain of [tokens], the first [accepted] were right. */
    fun verified(tokens: Int, accepted: Int) {
        for (token in 0 until minOf(tokens, accepted + 1)) {
            judged = 1 + FADING * judged
            right = (if (token < accepted) 1 else 0) + FADING * right
        }
    }

    /** (length of the chain that brings most tokens per second, these); FIRST_TOKENS, 0 where nothing is known. */
    fun best(costs: CostModel): Pair<Int, Double> {
        val each = token ?: return FIRST_TOKENS to 0.0
        val right = minOf(MOST_RIGHT, right / judged)
        var length = 1
        var rate = 0.0
        for (count in 1..minOf(most, MOST_TOKENS)) {
            val allRight = right.pow(count + 1)
            val waiting = costs.between + costs.step(count.toDouble())
            val drafting = count * each
            val hidden = minOf(maxOf(0.0, waiting - each), drafting)
            val seconds = maxOf(LEAST_SECONDS, waiting + drafting - allRight * hidden)
            val tokens = (1 - allRight) / (1 - right)
            if (tokens > rate * seconds) {
                length = count
                rate = tokens / seconds
            }
        }
        return length to rate
    }
}

/** A stream of the target. */
internal class StreamArm {
    /** Share of the tokens that begin a step, the others come of lookup; in the answers so far, of so many [tokens]. */
    var first = 1.0
    var usual = 1.0
        private set
    var tokens = 0
        private set

    /** Seconds between tokens besides the engine. */
    private var rest = 0.0

    /** WELCOME says that a step brings so many [tokens]. */
    fun told(tokens: Double) {
        if (this.tokens > 0) return
        first = 1 / maxOf(1.0, if (tokens > 0) tokens else PRIOR_STREAM)
        usual = first
    }

    /** A token came [gap] after the one before it. [engine]: 0: unknown. Many follow a late one at once. */
    fun came(gap: Double, engine: Double, sameStep: Boolean) {
        val begins = if (sameStep) 0.0 else 1.0
        val early = 1 / (PRIOR + tokens)
        first = blend(first, begins, maxOf(USUAL, early))
        usual = blend(usual, begins, maxOf(USUAL_TOKEN, early))
        tokens++
        val rest = if (engine > 0) minOf(gap - engine, OUTLIER * maxOf(engine, this.rest)) else gap
        this.rest = blend(this.rest, rest, maxOf(USUAL_TOKEN, 1.0 / tokens))
    }

    /** Tokens per second; null where nothing is known. */
    fun rate(costs: CostModel): Double? {
        if (costs.curve == null && costs.tokenSlowdown == null && tokens == 0) return null
        return 1 / maxOf(LEAST_SECONDS, first * costs.step(0.0) + maxOf(0.0, rest))
    }
}
