/** A request to the verifier that its verdict has settled: what was asked, what came of it, and what it took. */

import type { TokenTree } from "../protocol/tree.js";

/**
 * What the target is asked for. tree: to verify a tree of the drafter. chain: to verify a chain of the understudy.
 * catch up: to verify provisional text. stream: to write alone.
 */
export type RequestKind = "tree" | "chain" | "catch up" | "stream";

/**
 * What the verdicts of a stream have told so far of the time that its tokens take. silent: no token has come. untimed:
 * tokens have come, without a time. first: the first token told its step's time. running: a later one did too.
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
 * drew behind it. wait: since the request was sent, or since a stream's last token. engine, queue: the verifier's own part
 * of it. ended: behind the tokens the answer has ended. late: it came when it was overdue, so that an outage or a suspended
 * device made it wait, not the verifier. sameStep: a stream's token came of one step with the token before.
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

/** Whether the device drafted what was verified, so that the wait is a round's. */
export function wasDrafted({ kind, afterOpen }: Requested): boolean {
  return (kind === "tree" || kind === "chain") && !afterOpen;
}
