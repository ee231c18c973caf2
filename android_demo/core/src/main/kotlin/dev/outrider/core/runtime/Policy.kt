/** What an app decides about its answers. */
package dev.outrider.core.runtime

/** How the target is asked: trees to verify, or a stream that it writes itself. */
enum class Mode { TREE, STREAM }

/** Who writes. */
enum class Writer {
    /** The target's text; the drafter writes where the target is silent. */
    PREFER_CLOUD,

    /** The drafter writes at once and the target corrects it, at most [Policy.lead] tokens behind. */
    PREFER_DEVICE,

    /** The drafter drafts but never writes. */
    CLOUD_ONLY,

    /** Nobody is asked. */
    DEVICE_ONLY,
}

/** What becomes of text that the drafter wrote alone, when the target is back. */
enum class OnReturn {
    /** The target's text replaces what differs from it. */
    REPAIR,

    /** What was written stays, and the target goes on behind it; the text is then not the target's own. */
    KEEP,
}

/** How far the drafter writes alone. */
enum class Offline {
    /** To the end of the answer. */
    CONTINUE,

    /** Until the mean probability of the last tokens written falls below [Policy.minConfidence]. */
    PAUSE,
}

/**
 * minConfidence: a probability; lead: tokens. offlineRate: tokens per second written alone while the target may come
 * back, at most: faster than anybody reads, and no more than that would be taken back. Nothing holds
 * [Writer.DEVICE_ONLY] up.
 */
data class Policy(
    val writer: Writer = Writer.PREFER_CLOUD,
    val onReturn: OnReturn = OnReturn.REPAIR,
    val offline: Offline = Offline.CONTINUE,
    val minConfidence: Double = 0.35,
    val lead: Int = 48,
    val offlineRate: Double = 20.0,
) {
    init {
        require(offlineRate > 0) { "offlineRate is tokens per second and above 0, not $offlineRate" }
    }
}
