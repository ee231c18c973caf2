/**
 * What the device has measured of drafter, link and target, and what follows: tree size, when to stop, which mode.
 *
 * A round of tree drafting commits 1 + (sum of the sent nodes' acceptance probabilities) tokens and takes
 * exposed drafting + trip + step(nodes). A stream commits a token per step(0). Everything here maximises or compares
 * tokens per second by these two lines. Seconds throughout.
 */
package dev.outrider.core.runtime

import dev.outrider.core.protocol.CostCurve
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome
import kotlin.math.ceil
import kotlin.math.exp

/**
 * Weight of the newest observation; a token of a stream says less than a round, a tree drafted beside one stands for
 * the rounds between it and the last.
 */
private const val SMOOTHING = 0.2
private const val TOKEN_SMOOTHING = 0.1
private const val COMPARED_SMOOTHING = 0.4

/** Observations that a depth's calibration begins with, at "as predicted"; older ones fade. */
private const val PRIOR = 4.0
private const val FADING = 0.99

/** Levels that are calibrated apart; deeper ones count as the last. */
private const val DEPTHS = 12

/**
 * Another mode must promise so much more, so many times in a row: beside trees, and beside a stream, where a token that
 * was held up is followed by a burst.
 */
private const val MARGIN = 1.05
private const val TIMES = 2
private const val STREAM_TIMES = 8

/** Tokens of a stream that is tried; not where it is guessed to bring less than this share of what trees do. */
private const val TRIAL = 8
private const val WORTH_A_TRIAL = 0.5

/** Share of the time that trials may cost; after each, half as much, so many times. */
private const val TRYING = 0.03
private const val HALVINGS = 5

/** Bounds of what a drafting step must promise, in accepted tokens. */
private const val LEAST_GAIN = 0.01
private const val MOST_GAIN = 0.6

/** Of a tree, before one was drafted. */
private const val SOME_NODES = 16.0

/** A tree is drafted with so many times the nodes that were worth sending of those before it; at least so many. */
private const val SPARE = 2
private const val LEAST_NODES = 16

/** Tokens of a stream between trees drafted beside it; where trees bring less than half of what it does. */
private const val COMPARE_EVERY = 8
private const val COMPARE_RARELY = 64

/**
 * Share of a stream's time that drafting these trees may take, but for an answer's first streamed tokens: what is known
 * then is of other answers.
 */
private const val COMPARING = 0.02
private const val SOON = 32

/** Share of a round that drafting must be for drafting ahead, which costs energy and spares a third of it at most. */
private const val AHEAD_SHARE = 0.2

/** Seconds that nothing is faster than, so that no rate is infinite. */
private const val INSTANT = 1e-4

/** Smoothed measurements; they outlive answers. */
class Pace {
    /**
     * The verifier's, as WELCOME told, or null: a step takes a second. Steps of trees take [load] times as long now,
     * of single tokens [tokenLoad].
     */
    private var curve: CostCurve? = null
    private var load: Double? = null
    private var tokenLoad: Double? = null

    /** A round without the verifier's engine and queue. */
    private var trip: Double? = null
    private var queue = 0.0

    /** Drafting between a verdict and the next VERIFY. */
    private var exposed = 0.0
    private var drafterStep: Double? = null

    /** Drafting a tree of which nothing was there, and a tree for comparison. */
    private var whole: Double? = null
    private var compared = 0.0

    /** Between tokens of a stream, of which there were [gaps]; late: tokens arrive that an outage held back. */
    private var gap: Double? = null
    private var gaps = 0
    private var late = false

    /** Tokens of a tree round, and nodes of a tree. */
    private var tau = 2.0
    private var nodes: Double? = null

    /** Accepted nodes, by depth: as the drafter predicted them, and as they came. */
    private val predicted = DoubleArray(DEPTHS + 1) { PRIOR }
    private val accepted = DoubleArray(DEPTHS + 1) { PRIOR }

    // --- measurements ---

    /** A handshake took [trip]. Another verifier has other costs; what was measured of the same one stays. */
    fun linked(welcome: Welcome, trip: Double) {
        val told = CostCurve.unpack(welcome.costs)
        this.trip = trip
        if (told != null && told == curve) return
        curve = told
        load = null
        tokenLoad = null
        gap = null
        gaps = 0
    }

    /** [whole]: nothing of the tree was there before, and no prompt had to be read. */
    fun drafted(seconds: Double, steps: Int, whole: Boolean) {
        if (steps > 0) drafterStep = blend(drafterStep, seconds / steps)
        if (whole) this.whole = blend(this.whole, seconds)
    }

    /** A tree's verdict came after [wait]: [path] was accepted; engine, queue: the verifier's own part of it. */
    fun verified(
        tree: TokenTree, scores: List<Double>, path: List<Int>, wait: Double, engine: Double, queue: Double,
    ) {
        stepped(1 + tree.size, engine)
        trip = blend(trip, maxOf(0.0, wait - engine - queue))
        this.queue = blend(this.queue, queue)
        brought(tree, scores, path)
    }

    /** A streamed token came [gap] after the one before it. An outage, and what it held back, say nothing. */
    fun streamed(gap: Double, engine: Double, overdue: Boolean) {
        stepped(1, engine)
        late = overdue || (late && gap < engine / 2)
        if (late) return
        gaps++
        this.gap = blend(this.gap, gap, maxOf(TOKEN_SMOOTHING, 1.0 / gaps))
    }

    /** Of a tree drafted in [seconds] beside a stream, for comparison, [path] came true. */
    fun foreseen(tree: TokenTree, scores: List<Double>, path: List<Int>, seconds: Double) {
        brought(tree, scores, path, COMPARED_SMOOTHING)
        compared = blend(compared, seconds)
    }

    /** Learn from what came of a tree. tau is what its nodes promise, calibrated: that varies less than luck does. */
    private fun brought(tree: TokenTree, scores: List<Double>, path: List<Int>, weight: Double = SMOOTHING) {
        nodes = blend(nodes, tree.size.toDouble(), weight)
        if (scores.size != tree.size || scores.isEmpty()) {
            tau = blend(tau, 1.0 + path.size, weight)
            return
        }
        for (depth in 1..DEPTHS) {
            predicted[depth] = PRIOR + FADING * (predicted[depth] - PRIOR)
            accepted[depth] = PRIOR + FADING * (accepted[depth] - PRIOR)
        }
        for ((node, score) in scores.withIndex()) predicted[minOf(tree.depths[node], DEPTHS)] += exp(score)
        for (depth in 1..path.size) accepted[minOf(depth, DEPTHS)] += 1.0
        tau = blend(tau, expected(tree, scores).last(), weight)
    }

    /** Tokens that the first 1, 2, ... nodes of [tree] promise, as far as the drafter's promises were kept so far. */
    private fun expected(tree: TokenTree, scores: List<Double>): List<Double> {
        var tokens = 1.0
        return scores.mapIndexed { node, score ->
            val depth = minOf(tree.depths[node], DEPTHS)
            tokens += minOf(1.0, exp(score) * minOf(4.0, accepted[depth] / predicted[depth]))
            tokens
        }
    }

    fun waited(exposed: Double) {
        this.exposed = blend(this.exposed, exposed)
    }

    private fun stepped(tokens: Int, seconds: Double) {
        if (seconds <= 0) return
        val now = seconds / told(tokens.toDouble())
        val (own, other) = if (tokens > 1) load to tokenLoad else tokenLoad to load
        val new = blend(own, now)
        // each keeps a level of its own, as the curve may be wrong for one of them, and they rise and fall together
        val followed = if (own == null || other == null) other else other * new / own
        load = if (tokens > 1) new else followed
        tokenLoad = if (tokens > 1) followed else new
    }

    // --- what follows ---

    /** Tokens per second of tree drafting. */
    fun treeRate(): Double = tau / round()

    /** Seconds of a round of tree drafting. */
    fun round(): Double = maxOf(INSTANT, exposed + fixed() + treeStep())

    /** Tokens per second of a stream, or null where nothing is known. */
    fun streamRate(): Double? {
        gap?.let { return 1 / maxOf(INSTANT, it) }
        val step = step(0.0)
        return if (step > 0) 1 / (step + queue) else null
    }

    /** Seconds that a short stream costs in place of trees: it must be asked for, and may be slower. */
    fun trialCost(): Double {
        val token = streamRate()?.let { 1 / it } ?: 0.0
        return exposed + fixed() + TRIAL * maxOf(0.0, token - 1 / treeRate())
    }

    /**
     * Tokens of a stream between trees drafted beside it for comparison: each costs the device time and energy.
     *
     * [streamed]: tokens of this answer's streams so far.
     */
    fun compareEvery(streamed: Int): Int {
        val stream = streamRate() ?: return COMPARE_EVERY
        val every = if (2 * treeRate() < stream) COMPARE_RARELY else COMPARE_EVERY
        return if (streamed <= SOON) every else maxOf(every, ceil(compared * stream / COMPARING).toInt())
    }

    /** Whether drafting is enough of a round to be hidden. */
    fun draftsAhead(): Boolean = whole.let { it != null && it >= AHEAD_SHARE * (it + fixed() + treeStep()) }

    /** Accepted tokens that one more drafting step must promise to be worth its time. */
    fun gain(): Double = (treeRate() * (drafterStep ?: 0.0)).coerceIn(LEAST_GAIN, MOST_GAIN)

    /** Nodes to draft of the next tree, so that there is a choice of what to send. */
    fun worthDrafting(): Int = maxOf(LEAST_NODES, ceil(SPARE * (nodes ?: SOME_NODES)).toInt())

    /** How many nodes of [tree], best first, make most tokens per second; scores: log path probabilities. */
    fun worthSending(tree: TokenTree, scores: List<Double>): Int {
        if (scores.isEmpty()) return tree.size
        val rates = expected(tree, scores).mapIndexed { node, tokens ->
            tokens / maxOf(INSTANT, exposed + fixed() + step(node + 1.0))
        }
        return 1 + rates.indices.maxBy { rates[it] }
    }

    /** A round's time without drafting and the verifier's engine. */
    private fun fixed() = (trip ?: 0.0) + queue

    /** Seconds of the verifier's engine for a tree as they are now. */
    private fun treeStep() = step(nodes ?: SOME_NODES)

    /** Seconds of the verifier's engine for a tree of so many nodes; 0: for a token of a stream. */
    private fun step(nodes: Double): Double {
        val load = if (nodes > 0) load ?: tokenLoad else tokenLoad ?: load
        return (load ?: if (curve == null) 0.0 else 1.0) * told(1 + nodes)
    }

    /** Seconds of a step of so many tokens, as the verifier told; what it really takes is [load] times as long. */
    private fun told(tokens: Double): Double = curve?.at(tokens) ?: 1.0

    private fun blend(old: Double?, new: Double, weight: Double = SMOOTHING): Double =
        if (old == null) new else old + weight * (new - old)
}

/**
 * Tree or stream: whichever promises more tokens per second, with hysteresis. pinned: always this one.
 *
 * Beside a stream, trees are drafted for comparison. Beside trees, nothing but the verifier's curve tells how long a
 * stream's tokens take, and that may be wrong: so now and then, where it could be the better one, one is tried.
 */
class Controller(val pace: Pace, private val pinned: Mode? = null) {
    private var mode = Mode.TREE
    private var better = 0

    /** Trials so far, tokens that are left of one, and seconds that the next may cost. */
    private var trials = 0
    private var trial = 0
    private var saved = 0.0

    /** The mode of a new answer: no hysteresis, nothing is under way. */
    fun begin(): Mode {
        better = STREAM_TIMES
        return choose()
    }

    /** After every verdict. */
    fun choose(): Mode {
        if (pinned != null) return pinned
        val stream = pace.streamRate() ?: return mode
        val tree = pace.treeRate()
        if (trial > 0) {
            if (--trial == 0) endTrial(stream > MARGIN * tree)
            return mode
        }
        val (now, other) = if (mode == Mode.TREE) tree to stream else stream to tree
        better = if (other > MARGIN * now) better + 1 else 0
        if (better >= if (mode == Mode.TREE) TIMES else STREAM_TIMES) {
            mode = if (mode == Mode.TREE) Mode.STREAM else Mode.TREE
            better = 0
        } else if (mode == Mode.TREE && stream > WORTH_A_TRIAL * tree) {
            maybeTry()
        }
        return mode
    }

    /** Begin a trial if enough was saved for it. */
    private fun maybeTry() {
        saved += TRYING * pace.round()
        if (saved <= pace.trialCost() * (1 shl minOf(trials, HALVINGS))) return
        mode = Mode.STREAM
        trial = TRIAL
        saved = 0.0
        trials++
    }

    private fun endTrial(isBetter: Boolean) {
        better = 0
        if (!isBetter) mode = Mode.TREE
    }
}
