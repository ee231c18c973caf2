/** Actions that a session requests. Pure data, with the names of the other runtimes. */

import type { FinishReason } from "../protocol/ending.js";
import type { ClientMessage } from "../protocol/messages.js";
import type { Arm } from "../speed/arms.js";
import type { PauseReason, Writer } from "./states.js";
import type { TreeSize } from "./tuning.js";

/** Give `message` to the link. */
export interface Send {
  type: "Send";
  message: ClientMessage;
}

/** Draft a tree below `prefix`; answer with `Session.treeReady`. depth 0: only the bonus token is wanted. */
export interface DraftTree extends TreeSize {
  type: "DraftTree";
  prefix: number[];
  version: number;
}

/**
 * Let the understudy draft a chain of `tokens` tokens after `prefix`; answer with `Session.treeReady`. Its seconds are those
 * of the draft's steps, without known tokens and without reading the text.
 */
export interface DraftChain {
  type: "DraftChain";
  prefix: number[];
  version: number;
  tokens: number;
}

/**
 * Draft a tree below `prefix` that is not sent, to compare it with the stream. Answer with `Session.treeCompared`. arm:
 * "chain": instead of a tree, the understudy drafts a chain of `nodes` tokens, see DraftChain.
 */
export interface Compare extends TreeSize {
  type: "Compare";
  prefix: number[];
  arm: Arm;
}

/** Let `writer` write one token after `prefix`; answer with `Session.tokenWritten`. */
export interface WriteToken {
  type: "WriteToken";
  prefix: number[];
  version: number;
  writer: Writer;
}

/**
 * Let the understudy read `prefix`; answer with `Session.textRead(agreed, ...)`: how many of the tokens from `base` on it
 * would have written itself, up to the first difference. Reading may be cancelled once `Session.stillReads` is false; agreed
 * is null then.
 */
export interface ReadText {
  type: "ReadText";
  prefix: number[];
  base: number;
}

/** Feature rows [n, 2, heads, headDim] of tokens at `positions` [n], which the drafter lacks. */
export interface AddRows {
  type: "AddRows";
  positions: number[];
  rows: Float32Array;
}

/** `tokens` are the target's; the first `confirmed` of them were shown as provisional. */
export interface Commit {
  type: "Commit";
  tokens: number[];
  confirmed: number;
}

/** From here on `writer` writes offline. why: the understudy's failure, in words for people; else "". */
export interface HandOver {
  type: "HandOver";
  writer: Writer;
  why: string;
}

/** `tokens`, written offline, stay as they are: the answer continues after them (`keep`). */
export interface Adopt {
  type: "Adopt";
  tokens: number[];
}

export type Action =
  | Send
  /** Accept only verifiers with this `arithmetic`, or with an unknown one, from now on. */
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
   * Grow the tree that was just sent, while `Session.draftsAhead`, until the session's version changes; after a chain, the
   * understudy drafts on.
   */
  | { type: "DraftAhead"; version: number }
  /** `writer` wrote `token` offline. */
  | { type: "Provide"; token: number; writer: Writer }
  | HandOver
  /** The last provisional tokens, `tokens`, are rolled back: the target, or the understudy, draws otherwise. */
  | { type: "RollBack"; tokens: number[] }
  /** The verdict is overdue or the link is down. deadline: when it was due. */
  | { type: "Stall"; deadline: number }
  /** The target answers again. */
  | { type: "Resume" }
  /** Offline writing stops until the target answers or `proceed` is called. */
  | { type: "Pause"; reason: PauseReason }
  /** The link has been silent for too long: make another connection, unless it speaks first. */
  | { type: "Reconnect" }
  /** The answer has ended. */
  | { type: "Done"; reason: FinishReason };
