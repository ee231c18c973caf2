/** Where an answer stands, why it pauses and why it ends. */
package dev.outrider.core.runtime

/** Where an answer stands; docs/design.md has the table of transitions. */
enum class State {
    /** No request is under way; the drafter is growing a tree, or waits for the first link. */
    DRAFTING,

    /** The verdict on a tree is awaited. */
    VERIFYING,

    /** The target writes; its next token is awaited. */
    STREAMING,

    /** The target is silent, and the drafter writes. */
    ALONE,

    /** The target is silent, and nothing is written. */
    WAITING,

    FINISHED,
}

/** Why nothing is written alone: the drafter is [UNSURE] of its text, or somebody [ASKED] for it. */
enum class PauseReason { UNSURE, ASKED }

/** Why an answer ended. */
enum class FinishReason {
    /** Its own end, or a stop string. */
    STOP,

    /** As long as it may be. */
    LENGTH,

    /** The link never came back. */
    UNVERIFIED,

    /** The link never came back, and nothing may be written without it. */
    UNREACHABLE,

    CANCELLED,
}
