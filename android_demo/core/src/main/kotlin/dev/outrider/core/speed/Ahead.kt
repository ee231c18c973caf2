/**
 * Whether to continue drafting while waiting for a verdict: a flag of the arm of trees, tried and kept if it pays.
 *
 * It hides drafting time. But if device and verifier share processors, it slows the step being waited for.
 */
package dev.outrider.core.speed

/** Rounds of a trial. */
private const val TRIAL_ROUNDS = 3

/** [fixed]: never try the other choice. Seconds. */
internal class Ahead(var fixed: Boolean = false) {
    /** The current choice. */
    private var on = false

    /** What the last trial lost, and how many times as long its rounds were. */
    private var lost = 0.0
    private var behind = 1.0
    private var kept = emptyList<Double>()
    private var tried = emptyList<Double>()

    /** A trial is under way. */
    var trying = false
        private set

    /** Whether this round drafts ahead. */
    val now: Boolean get() = on != trying

    /** A round took so long, drafted [ahead] or not. */
    fun measured(ahead: Boolean, seconds: Double, explorer: Explorer) {
        if (ahead != now) {
            givenUp()
        } else if (!trying) {
            kept = (kept + seconds).takeLast(EVERY)
            trying = !fixed && explorer.due("ahead", lost, behind)
        } else {
            tried = tried + seconds
            if (tried.size == TRIAL_ROUNDS) ended(median(tried), median(kept))
        }
    }

    /** A round cannot be told from others: a trial begins again later. */
    fun givenUp() {
        trying = false
        tried = emptyList()
    }

    private fun ended(found: Double, usual: Double) {
        lost = TRIAL_ROUNDS * maxOf(0.0, found - usual)
        behind = found / usual
        if (MARGIN * found < usual) {
            on = !on
            kept = tried
        }
        givenUp()
    }

    private fun median(seconds: List<Double>): Double {
        val values = seconds.sorted()
        val middle = values.size / 2
        return if (values.size % 2 == 1) values[middle] else (values[middle - 1] + values[middle]) / 2
    }
}
