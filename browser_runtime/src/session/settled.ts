/** A request to the verifier after its verdict: its outcome and its duration. */

import type { TokenTree } from "../protocol/tree.js";
import type { Arm } from "../speed/arms.js";

/**
 * arm: null: provisional text is verified. tree: what was sent; empty for a stream. scores: log path probabilities of its
 * nodes. afterOpen: the verifier may have had to read the whole text first.
 */
export interface Requested {
  arm: Arm | null;
  tree: TokenTree;
  scores: readonly number[];
  afterOpen: boolean;
}

/**
 * Seconds throughout. accepted: node numbers of the accepted path. tokens: those of the path and the one that the target
 * drew after it. wait: since the request was sent, or since a stream's last token. engine: the verifier's own part of it.
 * ended: the answer has ended after the tokens. late: it came when it was overdue, so an outage or a suspended device
 * delayed it, not the verifier. sameStep: a stream's token came from the same step as the token before. askedFor: a stream's
 * token came of its first step, which had to be asked for.
 */
export interface Settled extends Requested {
  accepted: readonly number[];
  tokens: number[];
  wait: number;
  engine: number;
  ended: boolean;
  late: boolean;
  sameStep: boolean;
  askedFor: boolean;
}

/** Whether the device drafted the verified tokens, so that the wait is that of a round. */
export function wasDrafted({ arm, afterOpen }: Requested): boolean {
  return (arm === "tree" || arm === "chain") && !afterOpen;
}
