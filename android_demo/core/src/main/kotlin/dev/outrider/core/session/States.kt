/** The states of an answer, and the reasons for a pause. */
package dev.outrider.core.session

import dev.outrider.core.protocol.FinishReason

/** The state of an answer; docs/design.md shows the transitions. */
internal enum class State {
    /** No request is in flight; the drafter is growing a tree, or waits for the first link. */
    DRAFTING,

    /** The verdict on a tree is awaited. */
    VERIFYING,

    /** The target writes; its next token is awaited. */
    STREAMING,

    /** The target is silent, and the device writes offline. */
    ALONE,

    /** The target is silent, and nothing is written. */
    WAITING,

    FINISHED,
}

internal fun stateOf(verifier: VerifierState, offline: OfflineWriter, finished: FinishReason?): State = when {
    finished != null -> State.FINISHED
    offline.active -> if (offline.muted) State.WAITING else State.ALONE
    verifier.inFlight != null -> if (verifier.streams) State.STREAMING else State.VERIFYING
    else -> State.DRAFTING
}

/** The writer of a token of the answer. */
public enum class Writer {
    /** The full model, at the verifier. */
    TARGET,

    /** A complete model on the device. */
    UNDERSTUDY,

    /** The small model on the device that proposes tokens. */
    DRAFTER,
}

/** The reason why offline writing is paused. */
internal enum class PauseReason {
    /** The last tokens written were too improbable. */
    UNSURE,

    /** The drafter, without an understudy to follow it, has reached the end of a sentence. */
    LIMIT,

    /** [Session.pause] was called. */
    ASKED,
}
