/** What a round takes, in seconds: the cost model behind the rate of every arm. */
package dev.outrider.core.speed

import dev.outrider.core.protocol.CostCurve

/** Weight of the newest round in a smoothed measurement. */
internal const val SMOOTHING = 0.2

/** No duration is taken to be shorter, so that rates stay finite. */
internal const val LEAST_SECONDS = 1e-6

internal fun blend(old: Double?, new: Double, weight: Double = SMOOTHING): Double =
    if (old == null) new else old + weight * (new - old)

/**
 * curve: as WELCOME advertised it; null: a step is taken to last a second, see [slowdown]. rtt: of a round, without the
 * verifier's engine and queue. queue: of a round; as WELCOME has it until `queued` waits were measured. exposed:
 * drafting between a tree's verdict and the next VERIFY.
 */
internal class CostModel(
    private val curve: CostCurve? = null, var rtt: Double? = null, queue: Double = 0.0, var exposed: Double = 0.0,
) {
    /** Of steps for trees, and for single tokens: measured time over advertised time. */
    private var slowdown: Double? = null
    private var tokenSlowdown: Double? = null

    var queue = queue
        private set
    private var queued = 0

    /** A round's time without drafting and the verifier's engine. */
    val between: Double get() = (rtt ?: 0.0) + queue

    fun isOf(curve: CostCurve?): Boolean = curve != null && curve == this.curve

    /** Seconds of a step of [tokens] as the verifier advertised; it really takes [slowdown] times as long. */
    fun advertised(tokens: Double): Double = curve?.let { maxOf(LEAST_SECONDS, it.at(tokens)) } ?: 1.0

    /** Seconds of the verifier's engine for a tree of [nodes] nodes; 0: for a token of a stream. */
    fun step(nodes: Double): Double {
        val slowdown = if (nodes > 0) slowdown ?: tokenSlowdown else tokenSlowdown ?: slowdown
        return (slowdown ?: if (curve == null) 0.0 else 1.0) * advertised(1 + nodes)
    }

    /** Seconds of a round with a tree of [nodes] nodes. */
    fun round(nodes: Double): Double = maxOf(LEAST_SECONDS, exposed + between + step(nodes))

    /** A round with a step of [tokens] tokens took [wait], without drafting; engine, queue: the verifier's part. */
    fun measured(tokens: Int, wait: Double, engine: Double, queue: Double) {
        stepped(tokens, engine)
        rtt = blend(rtt, maxOf(0.0, wait - engine - queue))
        waited(queue)
    }

    /** A request waited [queue] seconds in the verifier's queue. */
    fun waited(queue: Double) {
        queued++
        this.queue = blend(this.queue, queue, maxOf(SMOOTHING, 1.0 / queued))
    }

    /**
     * A step took [engine] seconds. The slowdowns of trees and of single tokens rise and fall together, but each keeps
     * a level of its own: where the curve is wrong for one, the other must not be judged by it.
     */
    fun stepped(tokens: Int, engine: Double) {
        if (engine <= 0) return
        val (own, other) = if (tokens > 1) slowdown to tokenSlowdown else tokenSlowdown to slowdown
        val new = blend(own, engine / advertised(tokens.toDouble()))
        val followed = if (own == null || other == null) other else other * new / own
        slowdown = if (tokens > 1) new else followed
        tokenSlowdown = if (tokens > 1) followed else new
    }
}
