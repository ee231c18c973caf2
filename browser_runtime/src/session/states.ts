/** Where an answer stands, who wrote it, and why it ended or writes nothing. */

export type State = "drafting" | "verifying" | "streaming" | "writing alone" | "waiting for the link" | "finished";

/**
 * stop: its own end, or a stop string. length: it is as long as it may be. unverified: the link never came back.
 * unreachable: the same, and nothing may be written without it.
 */
export type FinishReason = "stop" | "length" | "unverified" | "unreachable" | "cancelled";

/** Who wrote a token of the answer. understudy: a complete model on the device. */
export type Writer = "target" | "understudy" | "drafter";

/**
 * unsure: the last tokens written had too little probability. limit: the drafter, with no understudy to follow it, has come
 * to the end of a sentence. asked: somebody called `pause`.
 */
export type PauseReason = "unsure" | "limit" | "asked";
