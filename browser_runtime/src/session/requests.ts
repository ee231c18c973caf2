/** One answer's requests to the verifier: their numbers, the one under way, and when its reply is overdue. */

import type { Constraint } from "../protocol/constraint.js";
import type { Verdict } from "../protocol/messages.js";
import type { Sampling } from "../protocol/sampling.js";
import type { TokenTree } from "../protocol/tree.js";
import { packIds, packTree } from "../protocol/wire.js";
import type { Send } from "./actions.js";
import { type Patience, RoundTimer } from "./timeouts.js";
import type { SessionStats } from "./transcript.js";

/**
 * A request whose reply is awaited. sent, due: when it was sent, and when its reply is overdue.
 *
 * tree: null for a GENERATE. scores: log path probabilities of the tree's nodes. chain: the understudy drafted it.
 * catchingUp: it is the chain of provisional tokens. afterOpen: the reply may take longer, as the verifier may have to
 * read the whole text first. streaming: of a GENERATE that brought a token already; `sent` is when the last one came.
 * tellsTimes: a token of it told what its step took. measured: one behind its first token did.
 */
export interface Flight {
  seq: number;
  tree: TokenTree | null;
  sent: number;
  due: number;
  afterOpen: boolean;
  scores: readonly number[];
  catchingUp: boolean;
  streaming: boolean;
  chain: boolean;
  tellsTimes: boolean;
  measured: boolean;
}

/** Whether a stream's `verdict` came of one step with the verdict before, which told its time. */
export function sameStep(flight: Flight, verdict: Verdict): boolean {
  return flight.tellsTimes && !verdict.engineUs;
}

/** Numbers requests and learns how long replies take. timer: of rounds; it outlives the answer. */
export class Requests {
  flight: Flight | null = null;
  seq = 0;
  /** An OPEN was sent and no request since. */
  private freshOpen = false;
  /** Between streamed tokens. */
  private readonly gaps: RoundTimer;

  constructor(
    private readonly stream: number,
    private readonly session: Uint8Array,
    private readonly sampling: Sampling,
    private readonly patience: Patience,
    private readonly timer: RoundTimer,
    private readonly stats: SessionStats,
    private readonly constraint?: Constraint,
  ) {
    this.gaps = new RoundTimer(timer.floor, timer.ceiling, timer.first);
  }

  /** OPEN with everything committed. Whatever was under way is forgotten. */
  open(committed: readonly number[], rowsHeld: number): Send {
    this.flight = null;
    this.freshOpen = true;
    const { stream, session, seq, sampling, constraint } = this;
    const featuresHave = Math.min(rowsHeld, committed.length - 1);
    const tokens = packIds(committed);
    const message = { type: "Open" as const, stream, session, seq, tokens, featuresHave, sampling };
    return { type: "Send", message: constraint ? { ...message, constraint } : message };
  }

  /** VERIFY `tree` below the first `base` tokens. */
  verify(
    tree: TokenTree,
    base: number,
    now: number,
    scores: readonly number[] = [],
    catchingUp = false,
    chain = false,
  ): Send {
    this.fly(tree, now, scores, catchingUp, chain);
    const { stream, seq } = this;
    return { type: "Send", message: { type: "Verify", stream, seq, baseLen: base, ...packTree(tree) } };
  }

  /** GENERATE at most `most` tokens behind the first `base`. */
  generate(base: number, most: number, now: number): Send {
    this.fly(null, now);
    const { stream, seq } = this;
    return { type: "Send", message: { type: "Generate", stream, seq, baseLen: base, maxNew: most, rows: true } };
  }

  /** `verdict` on `flight` came. A GENERATE stays under way: its next token is awaited. */
  answered(flight: Flight, verdict: Verdict, now: number): void {
    if (!flight.afterOpen && !sameStep(flight, verdict)) (flight.tree ? this.timer : this.gaps).add(now - flight.sent);
    this.flight = null;
    if (flight.tree) return;
    const due = now + this.gaps.timeout();
    const timed = verdict.engineUs > 0;
    const tellsTimes = flight.tellsTimes || timed;
    const measured = flight.measured || (flight.streaming && timed);
    const next = { afterOpen: false, scores: [], catchingUp: false, streaming: true, tellsTimes, measured };
    this.flight = { ...flight, sent: now, due, ...next };
  }

  private fly(
    tree: TokenTree | null,
    sent: number,
    scores: readonly number[] = [],
    catchingUp = false,
    chain = false,
  ): void {
    this.seq++;
    this.stats.calls++;
    const afterOpen = this.freshOpen;
    this.freshOpen = false;
    const wait = afterOpen ? Math.max(this.timer.timeout(), this.patience.open) : this.timer.timeout();
    const { seq } = this;
    const stream = { streaming: false, tellsTimes: false, measured: false };
    this.flight = { seq, tree, sent, due: sent + wait, afterOpen, scores, catchingUp, chain, ...stream };
  }
}
