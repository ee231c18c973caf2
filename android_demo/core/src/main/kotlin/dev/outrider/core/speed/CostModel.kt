/** What a round takes, in seconds: the cost model behind the rate of every arm. */
package dev.outrider.core.speed

import dev.outrider.core.protocol.CostCurve

/** Weight of the newest round in a smoothed measurement, and in what is usual. */
internal const val SMOOTHING = 0.2
internal const val USUAL = 0.05

/** Observations that a measurement begins with, if it was told or guessed. */
internal const val PRIOR = 4.0

/**
 * What takes longer than usual counts as at most so many times it: a suspended device says nothing of the next round.
 */
internal const val OUTLIER = 3.0

/** No duration is taken to be shorter, so that rates stay finite. */
internal const val LEAST_SECONDS = 1e-6

internal fun blend(old: Double?, new: Double, weight: Double = SMOOTHING): Double =
    if (old == null) new else old + weight * (new - old)

/**
 * curve: as WELCOME advertised it; null: a step is taken to last a second, see [slowdown]. rtt: of a round, without
 * drafting and the verifier's engine: the usual one, of so many `rounds` since the link came up, because a lost packet
 * is rare and takes long. queue: in the verifier, as WELCOME has it; once measured, [rtt] has it. exposed: drafting
 * between a tree's verdict and the next VERIFY.
 */
internal class CostModel(
    val curve: CostCurve? = null, private var rtt: Double? = null, private var queue: Double = 0.0,
    var exposed: Double = 0.0,
) {
    /** Of steps for trees, and for single tokens: measured time over advertised time. */
    private var slowdown: Double? = null
    var tokenSlowdown: Double? = null
        private set
    private var rounds = 0

    /** A round's time without drafting and the verifier's engine. */
    val between: Double get() = (rtt ?: 0.0) + queue

    /** Seconds of a step of [tokens] as the verifier advertised; it really takes [slowdown] times as long. */
    fun advertised(tokens: Double): Double = curve?.let { maxOf(LEAST_SECONDS, it.at(tokens)) } ?: 1.0

    /** Seconds of the verifier's engine for a tree of [nodes] nodes; 0: for a token of a stream. */
    fun step(nodes: Double): Double {
        val slowdown = if (nodes > 0) slowdown ?: tokenSlowdown else tokenSlowdown ?: slowdown
        return (slowdown ?: if (curve == null) 0.0 else 1.0) * advertised(1 + nodes)
    }

    /** Seconds of a round with a tree of [nodes] nodes. */
    fun round(nodes: Double): Double = maxOf(LEAST_SECONDS, exposed + between + step(nodes))

    /** A handshake took [rtt], and WELCOME told the [queue]. */
    fun linked(rtt: Double, queue: Double) {
        this.rtt = rtt
        this.queue = queue
        rounds = 0
    }

    /** A round with a step of [tokens] tokens took [wait], without drafting; engine: the verifier's part. */
    fun measured(tokens: Int, wait: Double, engine: Double) {
        stepped(tokens, engine)
        waited(wait - engine)
    }

    /** A round, or the way to a stream's first token, took [seconds] without drafting and the verifier's engine. */
    fun waited(seconds: Double) {
        rounds++
        val positive = maxOf(0.0, seconds)
        rtt = if (queue > 0) minOf(positive, OUTLIER * between) // what was told is replaced by the first measurement
        else blend(rtt, positive, maxOf(USUAL, 1 / (PRIOR + rounds)))
        queue = 0.0
    }

    /**
     * A step took [engine] seconds. The slowdowns of trees and of single tokens rise and fall together, but each keeps
     * a level of its own: where the curve is wrong for one, the other must not be judged by it.
     */
    fun stepped(tokens: Int, engine: Double) {
        if (engine <= 0) return
        val trees = tokens > 1
        val (own, other) = if (trees) slowdown to tokenSlowdown else tokenSlowdown to slowdown
        val new = blend(own, engine / advertised(tokens.toDouble()))
        val followed = if (own == null || other == null) other else other * new / own
        slowdown = if (trees) new else followed
        tokenSlowdown = if (trees) followed else new
    }
}
