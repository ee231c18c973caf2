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
    var on = false
        private set

    /** Rounds left of a trial of the other one. */
    var trial = 0

    /** Of a round without drafting ahead, and with it. */
    private val rounds = HashMap<Boolean, Double>()

    /** Whether this round drafts ahead. */
    val now: Boolean get() = on != (trial > 0)

    /** A round took so long, drafted [ahead] or not. */
    fun measured(ahead: Boolean, seconds: Double, explorer: Explorer) {
        if (ahead != now) {
            trial = 0
        } else if (trial > 0) {
            val found = blend(rounds[ahead], seconds, 1.0 / (TRIAL_ROUNDS + 1 - trial))
            rounds[ahead] = found
            if (--trial == 0 && MARGIN * found < rounds.getValue(!ahead)) on = ahead
        } else if (!fixed) {
            val usual = blend(rounds[ahead], seconds)
            rounds[ahead] = usual
            val other = rounds[!ahead] ?: usual
            if (explorer.due("ahead", TRIAL_ROUNDS * maxOf(0.0, other - usual), other / usual)) trial = TRIAL_ROUNDS
        }
    }
}
