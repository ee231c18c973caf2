/**
 * The one rule for what is not in use: when to try it, or to draft it for comparison; and the one for choosing.
 *
 * Whatever it is, it waits for EVERY steps (verdicts), and for more with the cube of what it is behind; and until what
 * it is expected to lose is paid for: SHARE of the time may be lost to all of it together.
 */
package dev.outrider.core.speed

/** An arm must promise this many times the tokens per second of the one in use. */
internal const val MARGIN = 1.05

/** Steps between two explorations of one thing, where it is as good as what is in use, and tokens of a stream tried. */
internal const val EVERY = 8

/** Share of the time that may be lost to exploring. */
private const val SHARE = 0.03

/** The fastest arm, or [now] unless another one is faster by the margin. [rates]: tokens per second. */
internal fun best(rates: Map<Arm, Double>, now: Arm, margin: Double = MARGIN): Arm {
    val fastest = rates.maxBy { it.value }
    return if (fastest.value > margin * (rates[now] ?: 0.0)) fastest.key else now
}

internal class Explorer {
    /** Seconds that may be lost at present, and steps since the last exploration of each thing. */
    private var saved = 0.0
    private val waited = HashMap<String, Int>()

    /** A step took [seconds]. */
    fun passed(seconds: Double) {
        saved += SHARE * seconds
    }

    /**
     * Whether to explore [what] after this step. [cost]: seconds expected to be lost. [behind]: what is in use brings
     * so many times as much.
     */
    fun due(what: String, cost: Double, behind: Double): Boolean {
        val steps = (waited[what] ?: 0) + 1
        val lead = maxOf(1.0, behind)
        val rarer = lead * lead * lead
        waited[what] = steps
        if (steps < EVERY * rarer || saved < cost * rarer) return false
        saved -= cost
        waited[what] = 0
        return true
    }
}
