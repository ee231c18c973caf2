/** An app's policy for its answers. */
package dev.outrider.core.session

/** The writer of an answer. */
public enum class WhoWrites {
    /** The target's text; the device writes while the target is silent. */
    PREFER_CLOUD,

    /** The device writes at once, at most [Policy.lead] tokens ahead; the target corrects it. */
    PREFER_DEVICE,

    /** The target's text alone: the device drafts, but never writes. */
    CLOUD_ONLY,

    /** The device's text alone: no verifier is contacted. */
    DEVICE_ONLY,
}

/** Treatment of offline text once the target is back. */
public enum class OnReturn {
    /** The target's text replaces what differs from it. */
    REPAIR,

    /** Offline text stays, and the target continues after it; the text is then not the target's own. */
    KEEP,
}

/** How far the device writes offline. */
public enum class Offline {
    /**
     * An understudy writes to the end of the answer; without one the drafter finishes its sentence, as more of its text
     * would not be useful, and the answer waits for the link. [WhoWrites.DEVICE_ONLY], which waits for no link,
     * continues.
     */
    SENTENCE,

    /** To the end of the answer, or until it repeats itself. */
    CONTINUE,

    /**
     * Until the mean probability of the last tokens written falls below [Policy.minConfidence], unless an understudy is
     * about to take over.
     */
    PAUSE,
}

/** Use of the understudy, if there is one. */
public enum class UnderstudyUse {
    /** It reads the text when the target falls silent, and the drafter writes until it has. */
    COLD,

    /**
     * It reads along, so that it can write at once, and drafts for the target if that is faster. That costs computing
     * time while the link is up.
     */
    WARM,

    /** The drafter alone writes. */
    OFF,
}

/**
 * An app's choice who writes, and what happens to offline text. minConfidence: mean probability of the last tokens
 * written, for [Offline.PAUSE]. lead: most unverified tokens, for [WhoWrites.PREFER_DEVICE]. offlineRate: most tokens
 * per second written offline while the target may come back: no reader is faster, and less text is rolled back. A
 * writer that was slow, or whose words replace others, may catch up one second of it. It does not limit
 * [WhoWrites.DEVICE_ONLY].
 */
public data class Policy(
    val writer: WhoWrites = WhoWrites.PREFER_CLOUD,
    val onReturn: OnReturn = OnReturn.REPAIR,
    val offline: Offline = Offline.SENTENCE,
    val minConfidence: Double = 0.35,
    val lead: Int = 48,
    val offlineRate: Double = 20.0,
    val understudy: UnderstudyUse = UnderstudyUse.COLD,
) {
    /** Whether the target writes whenever it can, so that trees and streams are alternatives. */
    internal val targetFirst: Boolean get() = writer == WhoWrites.PREFER_CLOUD || writer == WhoWrites.CLOUD_ONLY

    init {
        require(offlineRate > 0) { "offlineRate is tokens per second and above 0, not $offlineRate" }
    }
}
