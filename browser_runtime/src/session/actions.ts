/** Actions that a session requests. Pure data, with the names of the other runtimes. */

import type { FinishReason } from "../protocol/ending.js";
import type { ClientMessage } from "../protocol/messages.js";
import type { TreeSize } from "../speed/tuning.js";
import type { PauseReason, Writer } from "./states.js";

/** Give `message` to the link. */
export interface Send {
  type: "Send";
  message: ClientMessage;
}

/** Draft a tree below `prefix`; answer with `Session.treeReady`. depth may be 0: only the bonus token is wanted. */
export interface DraftTree extends TreeSize {
  type: "DraftTree";
  prefix: number[];
  version: number;
}

/**
 * Let the understudy draft a chain of `tokens` tokens behind `prefix`; answer with `Session.treeReady`, where the
 * seconds are those of the draft's steps: those of what was known, and of reading the text, do not count.
 */
export interface DraftChain {
  type: "DraftChain";
  prefix: number[];
  version: number;
  tokens: number;
}

/**
 * Draft a tree below `prefix` that is not sent: what comes of it is seen in the stream. Answer with
 * `Session.treeCompared`. chain: in place of a tree, the understudy is to draft a chain of so many tokens, as of
 * DraftChain.
 */
export interface Compare extends TreeSize {
  type: "Compare";
  prefix: number[];
  chain?: number;
}

/** Let `writer` write one token behind `prefix`; answer with `Session.tokenWritten`. */
export interface WriteToken {
  type: "WriteToken";
  prefix: number[];
  version: number;
  writer: Writer;
}

/**
 * Let the understudy read `prefix`; answer with `Session.textRead(agreed, ...)`: how many of the tokens from `base` on it
 * would have written itself, up to the first that it would not. The reading may be given up where `Session.stillReads` says that
 * not awaited any more; agreed is null then.
 */
export interface ReadText {
  type: "ReadText";
  prefix: number[];
  base: number;
}

/** Feature rows [n, 2, heads, headDim] of tokens at `positions` [n], which the drafter has not seen yet. */
export interface AddRows {
  type: "AddRows";
  positions: number[];
  rows: Float32Array;
}

/** `tokens` are the target's; the first `confirmed` of them stood there as provisional already. */
export interface Commit {
  type: "Commit";
  tokens: number[];
  confirmed: number;
}

/** From here on `writer` writes alone. why: the understudy failed, in words for people; else "". */
export interface HandOver {
  type: "HandOver";
  writer: Writer;
  why: string;
}

/** `tokens`, written by the drafter alone, stay as they are: the answer continues behind them (`keep`). */
export interface Adopt {
  type: "Adopt";
  tokens: number[];
}

export type Action =
  | Send
  /** From now on let only verifiers that compute in `arithmetic` answer, or say nothing of how they compute. */
  | { type: "Pin"; arithmetic: string }
  | DraftTree
  | DraftChain
  | Compare
  | WriteToken
  | ReadText
  | AddRows
  | Commit
  | Adopt
  /**
   * Grow the tree that was just sent on, where `Session.draftsAhead`, until the session's version changes; behind a
   * chain, the understudy writes on.
   */
  | { type: "DraftAhead"; version: number }
  /** `writer` wrote `token` on its own. */
  | { type: "Provide"; token: number; writer: Writer }
  | HandOver
  /** The last `tokens` provisional tokens are withdrawn: the target, or the understudy, draws otherwise. */
  | { type: "RollBack"; tokens: number[] }
  /** The verdict is overdue or the link is down. deadline: when it was due. */
  | { type: "Stall"; deadline: number }
  /** The target answers again. */
  | { type: "Resume" }
  /** Writing alone stops until the target answers or `proceed` is called. */
  | { type: "Pause"; reason: PauseReason }
  /** The link has been silent for too long: make another connection, unless it speaks first. */
  | { type: "Reconnect" }
  /** The answer has ended. */
  | { type: "Done"; reason: FinishReason };
