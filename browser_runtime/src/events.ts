/** Events that an answer yields while it grows, and the figures it ends with. */

import type { FinishReason, Writer } from "./session/states.js";
import type { Span } from "./session/transcript.js";

/** Who writes, as far as the link decides it. waiting: the target is silent and nothing is written. */
export type LinkStatus = "connecting" | "verified" | "alone" | "waiting";

/** What a user sees after an event: `verified` is the target's, `provisional` was written without it. */
interface Shown {
  verified: string;
  provisional: string;
}

/** `tokens` joined the verified text; `confirmed` of them stood there as provisional before. */
export interface Verified extends Shown {
  type: "verified";
  tokens: number[];
  confirmed: number;
}

/** `writer`, the drafter or the understudy, wrote `token` alone; a later event verifies it or takes it back. */
export interface Provisional extends Shown {
  type: "provisional";
  token: number;
  writer: Writer;
}

/** The last `count` provisional tokens were withdrawn: the target writes something else. `text`: what they read. */
export interface RolledBack extends Shown {
  type: "rolledBack";
  count: number;
  text: string;
}

/** `tokens`, written on the device alone, stay (`keep`): they stand in `verified` now, but nobody verified them. */
export interface Adopted extends Shown {
  type: "adopted";
  tokens: number[];
}

/** From here on `writer` writes alone. detail: why the understudy does not, where it failed; else "". */
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

/** The answer's end. detail: where the verifier was waited for in vain, or had no room, why. spans: who wrote which tokens. */
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
export interface AnswerStats {
  /** Verified. */
  tokens: number;
  rounds: number;
  /** Accepted and bonus tokens per tree round. */
  tau: number;
  nodes: number;
  /** Of the rounds, those whose tree the understudy drafted. */
  chains: number;
  /** Requests to the verifier. */
  calls: number;
  /** Tokens that the target wrote alone. */
  streamed: number;
  seconds: number;
  tokensPerSecond: number;
  firstTokenSeconds: number;
  bytesUp: number;
  bytesDown: number;
  /** Between asking for a tree or a token and having it; of that, what came first, for which the prompt is read. */
  draftSeconds: number;
  firstDraftSeconds: number;
  /** Between VERIFY and its verdict, tree rounds only; of that, the verifier's engine. */
  waitSeconds: number;
  engineSeconds: number;
  /** Drafting while a verdict was awaited, and nodes expanded then; of these, below the root that the verdict gave. */
  aheadSeconds: number;
  aheadNodes: number;
  aheadUsed: number;
  /** Trees whose root had been expanded ahead, and that could have been. */
  aheadHits: number;
  aheadRounds: number;
  /** Tokens written alone; of these, by the understudy. */
  provisional: number;
  understudy: number;
  kept: number;
  rolledBack: number;
  adopted: number;
  stalls: number;
  pauses: number;
  opens: number;
  /** Per stall: seconds from the moment the verdict was due to the first provisional token. */
  stallSeconds: number[];
}
