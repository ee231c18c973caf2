/** What a round takes, in seconds: the cost model behind the rate of every arm. */

import type { CostCurve } from "../protocol/costs.js";

/** Weight of the newest round in a smoothed measurement, and in what is usual. */
export const SMOOTHING = 0.2;
export const USUAL = 0.05;
/** Observations that a measurement begins with, if it was told or guessed. */
export const PRIOR = 4;
/**
 * What takes longer than usual counts as at most so many times it: a suspended device says nothing of the next round.
 */
export const OUTLIER = 3;
/** No duration is taken to be shorter, so that rates stay finite. */
export const LEAST_SECONDS = 1e-6;

export function blend(old: number | null, now: number, weight = SMOOTHING): number {
  return old === null ? now : old + weight * (now - old);
}

/**
 * curve: as WELCOME advertised it; null: a step is taken to last a second, see `slowdown`. rtt: of a round, without
 * drafting and the verifier's engine: the usual one, of so many `rounds` since the link came up, because a lost packet
 * is rare and takes long. queue: in the verifier, as WELCOME has it; once measured, `rtt` has it. exposed: drafting
 * between a tree's verdict and the next VERIFY.
 */
export class CostModel {
  /** Of steps for trees, and for single tokens: measured time over advertised time. */
  private slowdown: number | null = null;
  tokenSlowdown: number | null = null;
  private rounds = 0;

  constructor(
    readonly curve: CostCurve | null = null,
    public rtt: number | null = null,
    private queue = 0,
    public exposed = 0,
  ) {}

  /** The verifier is reached in another way, after a handshake that took `rtt`. queue: as WELCOME has it. */
  linked(rtt: number, queue: number): void {
    this.rtt = rtt;
    this.queue = queue;
    this.rounds = 0;
  }

  /** Seconds of a step of `tokens` tokens as the verifier advertised; it really takes `slowdown` times as long. */
  advertised(tokens: number): number {
    return this.curve ? Math.max(LEAST_SECONDS, this.curve.at(tokens)) : 1;
  }

  /** Seconds of the verifier's engine for a tree of `nodes` nodes; 0: for a token of a stream. */
  step(nodes: number): number {
    const slowdown = nodes ? (this.slowdown ?? this.tokenSlowdown) : (this.tokenSlowdown ?? this.slowdown);
    return (slowdown ?? (this.curve ? 1 : 0)) * this.advertised(1 + nodes);
  }

  /** A round's time without drafting and the verifier's engine. */
  get between(): number {
    return (this.rtt ?? 0) + this.queue;
  }

  /** Seconds of a round with a tree of `nodes` nodes. */
  round(nodes: number): number {
    return Math.max(LEAST_SECONDS, this.exposed + this.between + this.step(nodes));
  }

  /** A round with a step of `tokens` tokens took `wait`, without drafting; engine: the verifier's part. */
  measured(tokens: number, wait: number, engine: number): void {
    this.stepped(tokens, engine);
    this.waited(wait - engine);
  }

  /** A round, or the way to a stream's first token, took `seconds` without drafting and the verifier's engine. */
  waited(seconds: number): void {
    this.rounds++;
    const positive = Math.max(0, seconds);
    // what was told is replaced by the first measurement
    if (this.queue) this.rtt = Math.min(positive, OUTLIER * this.between);
    else this.rtt = blend(this.rtt, positive, Math.max(USUAL, 1 / (PRIOR + this.rounds)));
    this.queue = 0;
  }

  /**
   * A step took `engine` seconds. The slowdowns of trees and of single tokens rise and fall together, but each keeps a
   * level of its own: where the curve is wrong for one, the other must not be judged by it.
   */
  stepped(tokens: number, engine: number): void {
    if (engine <= 0) return;
    const trees = tokens > 1;
    const [own, other] = trees ? [this.slowdown, this.tokenSlowdown] : [this.tokenSlowdown, this.slowdown];
    const now = blend(own, engine / this.advertised(tokens));
    const followed = own === null || other === null ? other : (other * now) / own;
    [this.slowdown, this.tokenSlowdown] = trees ? [now, followed] : [followed, now];
  }
}
