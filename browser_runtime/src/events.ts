/** Events that an answer yields while it grows, and the figures it ends with. */

import type { FinishReason } from "./protocol/ending.js";
import type { Writer } from "./session/states.js";
import type { SessionStats } from "./session/stats.js";
import type { Span } from "./session/transcript.js";

/** Who writes, given the state of the link. waiting: the target is silent and nothing is written. */
export type LinkStatus = "connecting" | "verified" | "alone" | "waiting";

/** The text after an event: `verified` is the target's, `provisional` was written offline. */
interface Shown {
  verified: string;
  provisional: string;
}

/** `tokens` joined the verified text; `confirmed` of them had been shown as provisional. */
export interface Verified extends Shown {
  type: "verified";
  tokens: number[];
  confirmed: number;
}

/** `writer`, the drafter or the understudy, wrote `token` offline; a later event verifies it or rolls it back. */
export interface Provisional extends Shown {
  type: "provisional";
  token: number;
  writer: Writer;
}

/** The last `count` provisional tokens were rolled back: the target writes something else. `text`: their text. */
export interface RolledBack extends Shown {
  type: "rolledBack";
  count: number;
  text: string;
}

/** `tokens`, written on the device alone, stay (`keep`): they are in `verified` now, although unverified. */
export interface Adopted extends Shown {
  type: "adopted";
  tokens: number[];
}

/** From here on `writer` writes offline. detail: why the understudy failed, if it did; else "". */
export interface HandedOver extends Shown {
  type: "handedOver";
  writer: Writer;
  detail: string;
}

/** The link's state has changed. detail: a line for people. */
export interface LinkState extends Shown {
  type: "link";
  state: LinkStatus;
  detail: string;
}

/**
 * The end of the answer, always its last event. detail: why the verifier or an engine did not write all of it, if so; else
 * "". spans: who wrote which tokens.
 */
export interface Finished extends Shown {
  type: "finished";
  reason: FinishReason;
  tokenIds: number[];
  stats: AnswerStats;
  detail: string;
  spans: Span[];
}

export type Event = Verified | Provisional | RolledBack | Adopted | HandedOver | LinkState | Finished;

/** Figures of one answer. Seconds and bytes as measured; bytes count WebSocket frames of this answer. */
export interface AnswerStats extends Omit<SessionStats, "drafted" | "settled"> {
  /** Verified tokens. */
  tokens: number;
  /** Accepted and bonus tokens per tree round. */
  tau: number;
  seconds: number;
  tokensPerSecond: number;
  firstTokenSeconds: number;
  bytesUp: number;
  bytesDown: number;
  /** From requests for trees or tokens to their arrival; of that, the first one's, which includes reading the prompt. */
  draftSeconds: number;
  firstDraftSeconds: number;
  /** Drafting while a verdict was awaited, and nodes expanded then. */
  aheadSeconds: number;
  aheadNodes: number;
  /** Per stall: seconds from the moment the verdict was due to the first provisional token. */
  stallSeconds: number[];
}
