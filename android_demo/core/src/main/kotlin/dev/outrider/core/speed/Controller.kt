package dev.outrider.core.speed

/** How the device uses the target: to verify draft trees, or to write by itself. */
internal enum class Mode { TREE, STREAM }

/**
 * Tree or stream: whichever promises more tokens per second, with hysteresis. pinned: always this one.
 *
 * Beside a stream, trees are drafted for comparison. Beside trees, nothing but the verifier's curve tells how long a
 * stream's tokens take, and that may be wrong: so now and then, where it could be the better one, one is tried.
 */
internal class Controller(val pace: Pace, pinned: Mode? = null) {
    var pinned: Mode? = pinned
        internal set
    private val config = pace.config
    private var mode = Mode.TREE
    private var better = 0

    /** Trials so far, tokens that are left of one, and seconds that the next may cost. */
    private var trials = 0
    private var trial = 0
    private var saved = 0.0

    /**
     * The mode of an answer: trees, unless a stream is faster by the margin in answers of usual length.
     *
     * unknown: nothing tells of this answer yet; otherwise it goes on, on a new link, without hysteresis.
     */
    fun begin(unknown: Boolean = true): Mode {
        if (!unknown) {
            better = config.tokensToLeaveStream
            return choose()
        }
        if (trial > 0) mode = Mode.TREE
        trial = 0
        better = 0
        pace.forgetAnswer()
        val stream = pace.streamRate()
        if (pinned == null && stream != null) {
            val least = if (pace.uneven) config.worthBeginning else config.margin
            mode = if (stream > least * pace.usualDraftRate()) Mode.STREAM else Mode.TREE
        }
        return pinned ?: mode
    }

    /** After every verdict. */
    fun choose(): Mode {
        pinned?.let { return it }
        val stream = pace.streamRate() ?: return mode
        val tree = pace.draftRate()
        if (trial > 0) {
            if (--trial == 0) endTrial(stream > config.margin * tree)
            return mode
        }
        val (now, other) = if (mode == Mode.TREE) tree to stream else stream to pace.usualDraftRate()
        better = if (other > config.margin * now) better + 1 else 0
        if (better >= if (mode == Mode.TREE) config.roundsToLeaveTrees else config.tokensToLeaveStream) {
            mode = if (mode == Mode.TREE) Mode.STREAM else Mode.TREE
            better = 0
        } else if (mode == Mode.TREE && stream > config.worthATrial * tree) {
            maybeTry()
        }
        return mode
    }

    /** Begin a trial if enough was saved for it. */
    private fun maybeTry() {
        saved += config.trialShare * pace.round()
        if (saved <= pace.trialCost() * (1 shl minOf(trials, config.trialHalvings))) return
        mode = Mode.STREAM
        trial = config.trialTokens
        saved = 0.0
        trials++
    }

    private fun endTrial(isBetter: Boolean) {
        better = 0
        if (!isBetter) mode = Mode.TREE
    }
}
