/** The states of an answer, its writers, and the reasons for a pause. */

export type State = "drafting" | "verifying" | "streaming" | "writing alone" | "waiting for the link" | "finished";

/** The writer of a token of the answer. understudy: a complete model on the device. */
export type Writer = "target" | "understudy" | "drafter";

/**
 * unsure: the last tokens written had too little probability. limit: the drafter, with no understudy to follow it, has come
 * to the end of a sentence. asked: somebody called `pause`.
 */
export type PauseReason = "unsure" | "limit" | "asked";
