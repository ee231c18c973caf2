/** The states of an answer, and the reasons for a pause. */
package dev.outrider.core.session

import dev.outrider.core.protocol.FinishReason

/** The state of an answer; docs/design.md shows the transitions. */
internal enum class State {
    /** No request is under way; the drafter is growing a tree, or waits for the first link. */
    DRAFTING,

    /** The verdict on a tree is awaited. */
    VERIFYING,

    /** The target writes; its next token is awaited. */
    STREAMING,

    /** The target is silent, and the device writes. */
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

/** Why nothing is written alone. */
internal enum class PauseReason {
    /** The last tokens written had too little probability. */
    UNSURE,

    /** The drafter, with no understudy to follow it, has come to the end of a sentence. */
    LIMIT,

    /** Somebody called [Session.pause]. */
    ASKED,
}
