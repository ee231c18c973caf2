/** A request to the verifier after its verdict: the request, its outcome and its duration. */

import type { TokenTree } from "../protocol/tree.js";

/**
 * The kind of a request to the target. tree: to verify a tree of the drafter. chain: to verify a chain of the understudy.
 * catch up: to verify provisional text. stream: to decode by itself.
 */
export type RequestKind = "tree" | "chain" | "catch up" | "stream";

/**
 * How well the verdicts of a stream have timed its tokens so far. silent: no token has come. untimed: tokens have come,
 * without a time. first: the first one carried its step's time. running: so did a later one.
 */
export type StreamClock = "silent" | "untimed" | "first" | "running";

/**
 * tree: what was sent; empty for a stream. scores: log path probabilities of its nodes. afterOpen: the verifier may have
 * had to read the whole text first. clock: a stream's, before this token.
 */
export interface Requested {
  kind: RequestKind;
  tree: TokenTree;
  scores: readonly number[];
  afterOpen: boolean;
  clock: StreamClock;
}

/**
 * Seconds throughout. accepted: node numbers of the accepted path. tokens: those of the path and the one that the target
 * drew after it. wait: since the request was sent, or since a stream's last token. engine, queue: the verifier's own part of
 * it. ended: the answer has ended after the tokens. late: it came when it was overdue, so an outage or a suspended device
 * delayed it, not the verifier. sameStep: a stream's token came from the same step as the token before.
 */
export interface Settled extends Requested {
  accepted: readonly number[];
  tokens: number[];
  wait: number;
  engine: number;
  queue: number;
  ended: boolean;
  late: boolean;
  sameStep: boolean;
}

/** Whether the device drafted the verified tokens, so that the wait is that of a round. */
export function wasDrafted({ kind, afterOpen }: Requested): boolean {
  return (kind === "tree" || kind === "chain") && !afterOpen;
}
