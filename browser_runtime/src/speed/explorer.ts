/**
 * The one rule for what is not in use: when to try it, or to draft it for comparison; and the one for choosing.
 *
 * Whatever it is, it waits for EVERY steps (verdicts), and for more with the cube of what it is behind; and until what it is
 * expected to lose is paid for: SHARE of the time may be lost to all of it together.
 */

import type { Arm } from "./arms.js";

/** An arm must promise this many times the tokens per second of the one in use. */
export const MARGIN = 1.05;
/** Steps between two explorations of one thing, where it is as good as what is in use, and tokens of a stream tried. */
export const EVERY = 8;
/** Share of the time that may be lost to exploring. */
const SHARE = 0.03;

/** Tokens per second of arms. */
export type Rates = Map<Arm, number>;

/** The fastest arm, or `now` unless another one is faster by the margin. */
export function best(rates: Rates, now: Arm, margin = MARGIN): Arm {
  const [arm, rate] = [...rates].reduce((first, other) => (other[1] > first[1] ? other : first));
  return rate > margin * (rates.get(now) ?? 0) ? arm : now;
}

export class Explorer {
  /** Seconds that may be lost at present, and steps since the last exploration of each thing. */
  private saved = 0;
  private readonly waited = new Map<string, number>();

  /** A step took `seconds`. */
  passed(seconds: number): void {
    this.saved += SHARE * seconds;
  }

  /**
   * Whether to explore `what` after this step. cost: seconds expected to be lost. behind: what is in use brings so many times
   * as much.
   */
  due(what: string, cost: number, behind: number): boolean {
    const steps = (this.waited.get(what) ?? 0) + 1;
    const rarer = Math.max(1, behind) ** 3;
    this.waited.set(what, steps);
    if (steps < EVERY * rarer || this.saved < cost * rarer) return false;
    this.saved -= cost;
    this.waited.set(what, 0);
    return true;
  }
}
