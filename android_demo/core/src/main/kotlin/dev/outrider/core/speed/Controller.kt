package dev.outrider.core.speed

/**
 * Which arm writes: whichever promises most tokens per second, with hysteresis; and now and then another one, to know
 * what it brings. pinned: always this arm; trees and chains are one then.
 *
 * While streaming, the device drafts trees and chains for comparison. While drafting trees, it knows a stream's time
 * per token only from the verifier's curve, which may be wrong, and nothing of chains: so it tries them now and then.
 */
internal class Controller(val pace: Pace, var pinned: Arm? = null) {
    var arm = Arm.TREE
        private set

    /** Steps that are left of a trial, the arm before it, and steps in which another arm promised more. */
    var trial = 0
        private set
    private var home = Arm.TREE
    private var better = 0

    /**
     * The arm of an answer. [unknown]: nothing tells of it yet; otherwise it goes on, on a new link. There is no
     * hysteresis in either case.
     */
    fun begin(unknown: Boolean = true): Arm {
        if (!unknown) {
            better = EVERY
            return choose()
        }
        val before = if (trial > 0) home else arm
        trial = 0
        better = 0
        pace.forgetAnswer()
        arm = best(rates(), before, margin = 1.0)
        return arm
    }

    /** After every verdict, a step. */
    fun choose(): Arm {
        val rates = rates()
        if (trial > 0) {
            if (--trial == 0) switch(best(rates, home))
            return arm
        }
        val other = best(rates, arm)
        // a delayed token is followed by a burst: a stream is not left for a few of them
        better = if (other != arm) better + 1 else 0
        if (better >= if (arm == Arm.STREAM && arm in rates) EVERY else 1) switch(other)
        else if (arm != Arm.STREAM) maybeTry(rates)
        return arm
    }

    /** Whether to draft for [arm] beside the one in use. */
    fun compares(arm: Arm): Boolean {
        if (this.arm == Arm.CHAIN) return pace.explorer.due(arm.name, 0.0, 1.0) // the drafter is idle
        val rates = pace.rates()
        val now = rates[this.arm]
        val other = rates[arm]
        val behind = if (now != null && other != null) now / other else 1.0
        return pace.explorer.due(arm.name, pace.costs.exposed, behind)
    }

    private fun rates(): MutableMap<Arm, Double> {
        val rates = pace.rates()
        if (pinned == Arm.STREAM) return mutableMapOf(Arm.STREAM to (rates[Arm.STREAM] ?: Double.POSITIVE_INFINITY))
        if (pinned != null) rates -= Arm.STREAM
        return rates
    }

    private fun switch(arm: Arm) {
        this.arm = arm
        better = 0
    }

    /** Try a stream for a few tokens, or one chain, if it is due. */
    private fun maybeTry(rates: Map<Arm, Double>) {
        val now = rates.getValue(arm)
        if (arm == Arm.TREE && pace.chain.ready) {
            val chain = rates[Arm.CHAIN] ?: return attempt(Arm.CHAIN, 1)
            val cost = pace.costs.round(1.0) * maxOf(0.0, 1 - chain / now)
            if (pace.explorer.due(Arm.CHAIN.name, cost, now / chain)) return attempt(Arm.CHAIN, 1)
        }
        val stream = rates[Arm.STREAM] ?: return
        val cost = pace.costs.round(0.0) - pace.costs.step(0.0) + EVERY * maxOf(0.0, 1 / stream - 1 / now)
        if (pace.explorer.due(Arm.STREAM.name, cost, now / stream)) attempt(Arm.STREAM, EVERY)
    }

    private fun attempt(arm: Arm, steps: Int) {
        home = this.arm
        trial = steps
        switch(arm)
    }
}
