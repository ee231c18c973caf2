/**
 * What the device measured of drafter, link and target, and what follows from it: tree size, when to stop, which mode.
 *
 * A round of tree drafting commits 1 + (sum of the sent nodes' acceptance probabilities) tokens and takes
 * exposed drafting + round-trip time + step(nodes). A stream commits a token per step(0). Everything here maximises or
 * compares tokens per second by these two lines. Seconds throughout.
 */
package dev.outrider.core.speed

import dev.outrider.core.protocol.CostCurve
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome
import kotlin.math.ceil
import kotlin.math.exp

/** Smoothed measurements; they outlive answers. */
internal class Pace(val config: PaceConfig = PaceConfig()) {
    /**
     * The verifier's, as WELCOME advertised it, or null: a step is taken to last a second. Steps for trees take
     * [slowdown] times as long, steps for single tokens [tokenSlowdown].
     */
    private var curve: CostCurve? = null
    private var slowdown: Double? = null
    private var tokenSlowdown: Double? = null

    /** A round without the verifier's engine and queue. */
    private var rtt: Double? = null
    private var queue = 0.0

    /**
     * Drafting between a tree's verdict and the next VERIFY, 0.0 where nothing tells of it; reading and drafting
     * between another and a first tree.
     */
    private var exposed = 0.0
    private var reading = 0.0
    private var drafterStep: Double? = null

    /** Drafting a tree of which nothing was there, and a tree for comparison. */
    private var fromScratch: Double? = null
    private var compared = 0.0

    /** Of a stream by such a tree, where device and verifier share processors; [losing]: by the one under way. */
    private var lost = 0.0
    private var losing: Double? = null

    /** Streamed tokens since such a tree; below 0: so many more than it was entitled to. */
    private var uncompared = 0

    /** Between tokens of a stream, of which there were [gaps]; late: tokens arrive that an outage held back. */
    private var gap: Double? = null
    private var gaps = 0
    private var late = false

    /**
     * The same in the answers so far, and the share of a stream's tokens that came of one step with the token before,
     * of [usualGaps] measurements.
     */
    private var usualGap: Double? = null
    private var usualGaps = 0
    private var together = 0.0

    /** Tokens of a tree round in this answer; in the answers so far, which [trees] were measured of. */
    private var tau = 2.0
    private var usualTau = 2.0
    private var trees = 0

    /** Tokens of this answer, of those so far, and nodes of a tree. */
    private var written = 0
    private var usualLength: Double? = null
    private var nodes: Double? = null
    internal var ahead = Ahead()
        private set

    /** Of the understudy. */
    internal val chains = Chains()

    /** The round that ends with the next VERIFY, and whether it drafts ahead. */
    private var ending: Pair<Boolean, Ahead.Round>? = null

    /** Accepted nodes, by depth: as the drafter predicted them, and as they came. */
    private val predicted = DoubleArray(config.depths + 1) { config.prior }
    private val accepted = DoubleArray(config.depths + 1) { config.prior }

    // --- measurements ---

    /** A handshake took [rtt]. Another verifier has other costs; what was measured of the same one stays. */
    fun linked(welcome: Welcome, rtt: Double) {
        val advertised = CostCurve.unpack(welcome.costs)
        this.rtt = rtt
        if (advertised != null && advertised == curve) return
        curve = advertised
        slowdown = null
        tokenSlowdown = null
        gap = null
        gaps = 0
        usualGap = null
        usualGaps = 0
        together = 0.0
        exposed = 0.0
        reading = 0.0
        ending = null
        lost = 0.0
        losing = null
        ahead = Ahead(ahead.fixed)
    }

    /** [fromScratch]: nothing of the tree was there before, and no prompt had to be read. */
    fun drafted(seconds: Double, steps: Int, fromScratch: Boolean) {
        if (steps > 0) drafterStep = blend(drafterStep, seconds / steps)
        if (fromScratch) this.fromScratch = blend(this.fromScratch, seconds)
    }

    /** A tree's verdict came after [wait]: [path] was accepted; engine, queue: the verifier's own part of it. */
    fun verified(
        tree: TokenTree, scores: List<Double>, path: List<Int>, wait: Double, engine: Double, queue: Double,
    ) {
        val between = maxOf(0.0, wait - engine - queue)
        val measured = Ahead.Round(0.0, between, engine / advertised(1.0 + tree.size))
        ending = if (engine > 0) draftsAhead() to measured else null
        if (!ahead.trying) {
            stepped(1 + tree.size, engine)
            rtt = blend(rtt, between)
        }
        this.queue = blend(this.queue, queue)
        uncompared = 0
        written += 1 + path.size
        brought(tree, scores, path, config.smoothing, config.usualSmoothing)
    }

    /**
     * The verdict on a chain of [tokens] of the understudy came after [wait]: the first [accepted] were right. [ended]:
     * behind them the answer has ended, and nothing is known of the others.
     */
    fun chainVerified(
        tokens: Int, accepted: Int, wait: Double, engine: Double, queue: Double, ended: Boolean = false,
    ) {
        ending = null
        stepped(1 + tokens, engine)
        rtt = blend(rtt, maxOf(0.0, wait - engine - queue))
        this.queue = blend(this.queue, queue)
        uncompared = 0
        written += 1 + accepted
        chains.verified(if (ended) accepted else tokens, accepted)
    }

    /**
     * A streamed token came [gap] after the one before it. An outage, and what it held back, say nothing.
     * [sameStep]: it came of one step with the one before, which told its time. [beside]: a tree for comparison was
     * drafted meanwhile; what the step lost by that is not part of the gap.
     */
    fun streamed(
        gap: Double, engine: Double, overdue: Boolean, beside: Boolean = false, sameStep: Boolean = false,
    ) {
        ending = null
        written++
        var now = 0.0
        if (!sameStep && beside && tokenSlowdown != null) {
            now = engine - step(0.0)
            losing = (losing ?: 0.0) + now
        } else if (!sameStep) {
            stepped(1, engine)
            losing?.let { lost = blend(lost, maxOf(0.0, it), config.comparisonSmoothing) }
            losing = null
        }
        late = overdue || (late && (sameStep || gap < engine / 2))
        if (late) return
        gaps++
        usualGaps++
        val own = maxOf(0.0, gap - maxOf(0.0, now))
        this.gap = blend(this.gap, own, maxOf(config.tokenSmoothing, 1.0 / gaps))
        val usual = maxOf(config.usualTokenSmoothing, 1.0 / usualGaps)
        usualGap = blend(usualGap, own, usual)
        together = blend(together, if (sameStep) 1.0 else 0.0, usual)
    }

    /** Of a tree drafted in [seconds] beside a stream, for comparison, [path] came true. */
    fun foreseen(tree: TokenTree, scores: List<Double>, path: List<Int>, seconds: Double) {
        brought(tree, scores, path, config.comparisonSmoothing, config.usualComparisonSmoothing)
        compared = blend(compared, seconds)
        exposed = if (exposed > 0) minOf(exposed, seconds) else seconds
    }

    /** [seconds] passed between a verdict and an answer's first tree, or the first behind a stream: no round ends. */
    fun prepared(seconds: Double) {
        ending = null
        ahead.givenUp()
        reading = maxOf(seconds, blend(reading, seconds))
    }

    /** Learn from what came of a tree. tau is what its nodes promise, calibrated: that varies less than luck does. */
    private fun brought(tree: TokenTree, scores: List<Double>, path: List<Int>, weight: Double, usual: Double) {
        nodes = blend(nodes, tree.size.toDouble(), weight)
        if (scores.size != tree.size || scores.isEmpty()) {
            brought(1.0 + path.size, weight, usual)
            return
        }
        for (depth in 1..config.depths) {
            predicted[depth] = config.prior + config.fading * (predicted[depth] - config.prior)
            accepted[depth] = config.prior + config.fading * (accepted[depth] - config.prior)
        }
        for ((node, score) in scores.withIndex()) predicted[minOf(tree.depths[node], config.depths)] += exp(score)
        for (depth in 1..path.size) accepted[minOf(depth, config.depths)] += 1.0
        brought(expected(tree, scores).last(), weight, usual)
    }

    private fun brought(tokens: Double, weight: Double, usual: Double) {
        trees++
        tau = blend(tau, tokens, weight)
        usualTau = blend(usualTau, tokens, maxOf(usual, 1 / (config.prior + trees)))
    }

    /** A new answer begins, of which nothing is known. */
    internal fun forgetAnswer() {
        tau = usualTau
        if (uneven) gap = usualGap
        reading *= config.readingFading
        if (written == 0) return
        usualLength = blend(usualLength, written.toDouble(), config.lengthSmoothing)
        written = 0
    }

    /** Tokens that the first 1, 2, ... nodes of [tree] promise, as far as the drafter's promises were kept so far. */
    private fun expected(tree: TokenTree, scores: List<Double>): List<Double> {
        var tokens = 1.0
        return scores.mapIndexed { node, score ->
            val depth = minOf(tree.depths[node], config.depths)
            tokens += minOf(1.0, exp(score) * minOf(config.mostCorrection, accepted[depth] / predicted[depth]))
            tokens
        }
    }

    /** [exposed] seconds passed between a verdict and the next VERIFY: a round ends. */
    fun waited(exposed: Double) {
        val ended = ending
        ending = null
        if (!ahead.trying) this.exposed = blend(this.exposed, exposed)
        if (ended == null || !muchToHide()) return ahead.givenUp()
        val (drafted, round) = ended
        val better = ahead.measured(drafted, round.copy(exposed = exposed), advertised(1 + treeNodes())) ?: return
        this.exposed = better.exposed
        rtt = better.between
        slowdown = better.stretch
    }

    private fun stepped(tokens: Int, seconds: Double) {
        if (seconds <= 0) return
        val now = seconds / advertised(tokens.toDouble())
        val (own, other) = if (tokens > 1) slowdown to tokenSlowdown else tokenSlowdown to slowdown
        val new = blend(own, now)
        // each keeps a level of its own, as the curve may be wrong for one of them, and they rise and fall together
        val followed = if (own == null || other == null) other else other * new / own
        val before = step(0.0)
        slowdown = if (tokens > 1) new else followed
        tokenSlowdown = if (tokens > 1) followed else new
        val known = gap ?: return
        if (tokens <= 1) return
        // no stream tells at present how long its tokens take; the next one tells more than this guess
        val longer = (1 - together) * (step(0.0) - before)
        gap = maxOf(config.leastSeconds, known + longer)
        usualGap = maxOf(config.leastSeconds, (usualGap ?: known) + longer)
        gaps = 1
    }

    // --- what follows ---

    /** Tokens per second of tree drafting. */
    fun treeRate(): Double = tau / round()

    /** Tokens per second of an answer of usual length in trees, with what the drafter has to read first. */
    fun usualTreeRate(): Double = 1 / (1 / treeRate() + (usualLength?.let { reading / it } ?: 0.0))

    /** Tokens per second of trees or of the understudy's chains, whichever are faster. */
    fun draftRate(): Double = maxOf(treeRate(), bestChain().second)

    /** The same, of an answer of usual length in trees. */
    fun usualDraftRate(): Double = maxOf(usualTreeRate(), bestChain().second)

    /**
     * Tokens of the chain that the understudy is to draft next; 0: the drafter drafts a tree.
     *
     * [goingOn]: the last one was a chain too; leaving them takes the margin, and so does coming to them.
     */
    fun chain(goingOn: Boolean): Int {
        val (length, rate) = bestChain()
        val margin = if (goingOn) 1 / config.margin else config.margin
        if (length > 0 && rate > margin * treeRate()) {
            chains.chosen()
            return length
        }
        return if (chains.tryNow()) FIRST_TOKENS else 0
    }

    /** (length, tokens per second) of the understudy's best chain; 0, 0 where nothing is known of them. */
    private fun bestChain(): Pair<Int, Double> = chains.best(between(), ::step)

    /** Seconds of a round of tree drafting. */
    fun round(): Double = maxOf(config.leastSeconds, fixed() + treeStep())

    /** Tokens per second of a stream, or null where nothing is known. */
    fun streamRate(): Double? {
        gap?.let { return 1 / maxOf(config.leastSeconds, it) }
        val step = step(0.0)
        return if (step > 0) 1 / (step + queue) else null
    }

    /** Whether a stream's steps bring as many tokens as the text allows, so that an answer has a rate of its own. */
    val uneven get() = together >= config.uneven

    /** Seconds that a short stream costs in place of trees: it must be asked for, and may be slower. */
    fun trialCost(): Double {
        val token = streamRate()?.let { 1 / it } ?: 0.0
        return fixed() + config.trialTokens * maxOf(0.0, token - 1 / draftRate())
    }

    /**
     * Tokens of a stream between trees drafted beside it for comparison: each costs the device time and energy.
     *
     * [streamed]: tokens of this answer's streams so far.
     */
    fun compareEvery(streamed: Int): Int {
        val stream = streamRate() ?: return config.compareEvery
        val ahead = maxOf(1.0, stream / draftRate())
        val rarer = ahead * ahead * ahead
        val every = minOf(config.compareRarely.toDouble(), config.compareEvery * rarer).toInt()
        val cost = if (streamed <= config.earlyTokens) lost else maxOf(lost, compared)
        val paid = cost * stream / config.comparisonShare
        return maxOf(every, ceil(maxOf(paid, minOf(config.compareSeldom.toDouble(), rarer * paid))).toInt())
    }

    /**
     * Whether to draft a tree for comparison, after [streamed] tokens of this answer's streams.
     *
     * [first]: nothing else tells of this answer yet, so it may come early, as long as the average is kept: tokens are
     * counted over answers.
     */
    fun compares(streamed: Int, first: Boolean): Boolean {
        uncompared++
        val every = compareEvery(streamed)
        val early = first && streamed >= config.compareEvery && uncompared >= 0
        if (uncompared < every && !early) return false
        uncompared = minOf(0, uncompared - every)
        return true
    }

    /** Whether to draft on while the next verdict is awaited. */
    fun draftsAhead(): Boolean = ahead.now && muchToHide()

    /** Whether drafting is enough of a round to be hidden. */
    private fun muchToHide(): Boolean =
        fromScratch.let { it != null && it >= config.aheadShare * (it + between() + treeStep()) }

    /** Accepted tokens that one more drafting step must promise to be worth its time. */
    fun gain(): Double = (treeRate() * (drafterStep ?: 0.0)).coerceIn(config.leastGain, config.mostGain)

    /** Nodes to draft of the next tree, so that there is a choice of what to send. */
    fun worthDrafting(): Int = maxOf(config.leastNodes, ceil(config.spare * treeNodes()).toInt())

    /** How many nodes of [tree], best first, make most tokens per second; scores: log path probabilities. */
    fun worthSending(tree: TokenTree, scores: List<Double>): Int {
        if (scores.isEmpty()) return tree.size
        val rates = expected(tree, scores).mapIndexed { node, tokens ->
            tokens / maxOf(config.leastSeconds, fixed() + step(node + 1.0))
        }
        return 1 + rates.indices.maxBy { rates[it] }
    }

    /** A round's time without the verifier's engine. */
    private fun fixed() = exposed + between()

    /** A round's time without drafting and the verifier's engine. */
    private fun between() = (rtt ?: 0.0) + queue

    /** Seconds of the verifier's engine for a tree as they are now. */
    private fun treeStep() = step(treeNodes())

    /** Nodes of a tree as they are now. */
    private fun treeNodes() = nodes ?: config.firstNodes

    /** Seconds of the verifier's engine for a tree of [nodes] nodes; 0: for a token of a stream. */
    private fun step(nodes: Double): Double {
        val slowdown = if (nodes > 0) slowdown ?: tokenSlowdown else tokenSlowdown ?: slowdown
        return (slowdown ?: if (curve == null) 0.0 else 1.0) * advertised(1 + nodes)
    }

    /** Seconds of a step of [tokens] as the verifier advertised; it really takes [slowdown] times as long. */
    private fun advertised(tokens: Double): Double = curve?.at(tokens) ?: 1.0

    private fun blend(old: Double?, new: Double, weight: Double = config.smoothing): Double =
        if (old == null) new else old + weight * (new - old)
}
