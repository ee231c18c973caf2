/** The states of an answer, its writers, and the reasons for a pause. */

export type State = "drafting" | "verifying" | "streaming" | "writing alone" | "waiting for the link" | "finished";

/** The writer of a token of the answer. understudy: a complete model on the device. */
export type Writer = "target" | "understudy" | "drafter";

/**
 * The reason why offline writing is paused. unsure: the last tokens written were too improbable. limit: the drafter, without
 * an understudy to follow it, has reached the end of a sentence. asked: `pause` was called.
 */
export type PauseReason = "unsure" | "limit" | "asked";
