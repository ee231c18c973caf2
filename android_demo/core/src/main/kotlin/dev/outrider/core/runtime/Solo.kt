package dev.outrider.core.runtime

/** Tokens over which the drafter's confidence is averaged. */
private const val CONFIDENCE_WINDOW = 8

/** The drafter on its own: what [policy] allows it to write without the target. */
internal class Solo(private val policy: Policy) {
    private val confidence = ArrayDeque<Double>()

    /** The target is silent. */
    var alone = false
    var paused: PauseReason? = null

    /** The drafter writes without waiting for the target. */
    val writesFirst: Boolean
        get() = (policy.writer == Writer.PREFER_DEVICE || policy.writer == Writer.DEVICE_ONLY) && paused == null

    /** Nothing is written alone, whatever happens to the link. */
    val mute: Boolean get() = paused != null || policy.writer == Writer.CLOUD_ONLY

    /** The drafter writes while the target may come back. */
    val mayBeTakenBack: Boolean get() = alone && policy.writer != Writer.DEVICE_ONLY

    /** Whether another token may follow [provisional] unverified ones. */
    fun mayWrite(provisional: Int): Boolean = when {
        mute -> false
        policy.writer == Writer.PREFER_DEVICE && !alone -> provisional < policy.lead
        else -> alone
    }

    /** A token of probability [sure] was written: whether the policy wants a pause now. */
    fun doubts(sure: Double): Boolean {
        confidence.addLast(sure)
        if (confidence.size > CONFIDENCE_WINDOW) confidence.removeFirst()
        val unsure = confidence.size == CONFIDENCE_WINDOW && confidence.average() < policy.minConfidence
        return unsure && policy.offline == Offline.PAUSE
    }

    /** Somebody asked to go on. */
    fun proceed() {
        paused = null
        confidence.clear()
    }

    /** The target answers again; a pause that somebody asked for stays. */
    fun targetIsBack() {
        alone = false
        if (paused == PauseReason.UNSURE) paused = null
        confidence.clear()
    }
}
