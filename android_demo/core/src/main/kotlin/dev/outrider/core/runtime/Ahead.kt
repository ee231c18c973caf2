/**
 * Whether to draft on while a verdict is awaited: tried for a few rounds now and then, and kept where it pays.
 *
 * It hides drafting. But where device and verifier share processors, it slows the very step that is awaited.
 */
package dev.outrider.core.runtime

/** Rounds of a trial, and measured rounds before the first one. */
private const val TRIAL_ROUNDS = 4

/** Rounds between trials: at least so many, and twice as many after each trial that changed nothing, up to so many. */
private const val OFTEN = 24
private const val RARELY = 192

/** [fixed]: there is no choice, so that nothing is tried. */
internal class Ahead(var fixed: Boolean = false) {
    /** Seconds of exposed drafting, and a step's time over the advertised one. */
    data class Round(val exposed: Double, val stretch: Double)

    /** The way that is kept. */
    private var on = false
    var trying = false
        private set
    private var until = TRIAL_ROUNDS // rounds until the next trial
    private var pause = OFTEN
    private val rounds = mutableListOf<Round>()

    /** Whether this round drafts ahead. */
    val now: Boolean get() = on != trying

    /** A round was measured as rounds are now. */
    fun kept() {
        until--
        trying = until <= 0 && !fixed
    }

    /** A round of a trial; the mean of all at the trial's end, for [ended] to be told what it is worth. */
    fun tried(round: Round): Round? {
        rounds += round
        if (rounds.size < TRIAL_ROUNDS) return null
        return Round(rounds.map { it.exposed }.average(), rounds.map { it.stretch }.average())
    }

    /** Whether the rounds tried were the shorter ones. */
    fun ended(better: Boolean) {
        on = on != better
        pause = if (better) OFTEN else minOf(2 * pause, RARELY)
        until = pause
        trying = false
        rounds.clear()
    }
}
