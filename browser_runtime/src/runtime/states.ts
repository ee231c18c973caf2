/** Where an answer stands, and why it ended or writes nothing. */

export type State = "drafting" | "verifying" | "streaming" | "writing alone" | "waiting for the link" | "finished";

/**
 * stop: its own end, or a stop string. length: it is as long as it may be. unverified: the link never came back.
 * unreachable: the same, and nothing may be written without it.
 */
export type FinishReason = "stop" | "length" | "unverified" | "unreachable" | "cancelled";

/** unsure: the drafter gave its last tokens too little probability. asked: somebody called `pause`. */
export type PauseReason = "unsure" | "asked";
