/**
 * Whether to continue drafting while waiting for a verdict: tried for a few rounds now and then, and kept if it pays.
 *
 * It hides drafting time. But if device and verifier share processors, it slows the step being waited for.
 */
package dev.outrider.core.speed

import kotlin.math.ceil

/** Rounds of a trial, and measured rounds before the first one. */
private const val TRIAL_ROUNDS = 4

/** After so many, all of them longer than usual by this factor, a trial ends. */
private const val SURE_ROUNDS = 2
private const val HOPELESS = 1.25

/** Rounds between trials, at least and at most. */
private const val OFTEN = 24
private const val RARELY = 400

/** Share of the time between two trials that the first of them may have lost. */
private const val TRIAL_SHARE = 0.02

/** Rounds outside of trials that a trial is compared with. */
private const val COMPARED = 8

/** The rounds tried must be shorter by this factor. */
private const val MARGIN = 1.03

/** [fixed]: there is no choice, so that nothing is tried. */
internal class Ahead(var fixed: Boolean = false) {
    /**
     * A round of trees in seconds, but for [stretch]: the step's time over the advertised one. exposed: between a
     * verdict and the next VERIFY. between: of the wait, what was neither the engine nor its queue.
     */
    data class Round(val exposed: Double, val between: Double, val stretch: Double) {
        /** [step]: the advertised time of a step. */
        fun seconds(step: Double) = exposed + between + stretch * step
    }

    /** The way that is kept. */
    private var on = false
    private var until = TRIAL_ROUNDS // rounds until the next trial
    private var kept = emptyList<Round>()
    private var tried = emptyList<Round>()

    /** Whether a trial is under way. */
    val trying: Boolean get() = until <= 0 && !fixed

    /** Whether this round drafts ahead. */
    val now: Boolean get() = on != trying

    /**
     * A round was drafted [ahead], or not. [step]: seconds of an advertised step for a tree as they are. Returns what
     * rounds are like from now on, where a trial has ended that showed them to be shorter.
     */
    fun measured(ahead: Boolean, round: Round, step: Double): Round? {
        if (ahead != now) {
            givenUp()
        } else if (!trying) {
            until--
            kept = (kept + round).takeLast(COMPARED)
        } else {
            tried = tried + round
            if (tried.size == TRIAL_ROUNDS || hopeless(step)) return ended(step)
        }
        return null
    }

    /** A round cannot be told from others: a trial begins again later. */
    fun givenUp() {
        if (!trying) return
        until = TRIAL_ROUNDS
        tried = emptyList()
    }

    private fun hopeless(step: Double): Boolean =
        tried.size >= SURE_ROUNDS && tried.minOf { it.seconds(step) } > HOPELESS * medians(kept).seconds(step)

    private fun ended(step: Double): Round? {
        val found = medians(tried)
        val usual = medians(kept).seconds(step)
        val lost = tried.size * (found.seconds(step) - usual)
        until = ceil(lost / (TRIAL_SHARE * usual)).toInt().coerceIn(OFTEN, RARELY)
        val better = MARGIN * found.seconds(step) < usual
        if (better) {
            on = !on
            kept = tried
        }
        tried = emptyList()
        return if (better) found else null
    }

    private fun medians(rounds: List<Round>): Round {
        fun median(of: (Round) -> Double): Double {
            val values = rounds.map(of).sorted()
            val middle = values.size / 2
            return if (values.size % 2 == 1) values[middle] else (values[middle - 1] + values[middle]) / 2
        }
        return Round(median { it.exposed }, median { it.between }, median { it.stretch })
    }
}
