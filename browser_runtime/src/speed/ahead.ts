/**
 * Whether to continue drafting while waiting for a verdict: a flag of the arm of trees, tried and kept if it pays.
 *
 * It hides drafting time. But if device and verifier share processors, it slows the step being waited for.
 */

import { blend } from "./costModel.js";
import { type Explorer, MARGIN } from "./explorer.js";

/** Rounds of a trial. */
const TRIAL_ROUNDS = 3;

/** fixed: never try the other choice. */
export class Ahead {
  /** The current choice. */
  on = false;
  /** Rounds left of a trial of the other one. */
  trial = 0;
  /** Seconds of a round without drafting ahead, and with it. */
  private readonly rounds = new Map<boolean, number>();

  constructor(public fixed = false) {}

  /** Whether this round drafts ahead. */
  get now(): boolean {
    return this.on !== Boolean(this.trial);
  }

  /** A round took so long, drafted ahead or not. */
  measured(ahead: boolean, seconds: number, explorer: Explorer): void {
    const before = this.rounds.get(ahead) ?? seconds;
    if (ahead !== this.now) {
      this.trial = 0;
    } else if (this.trial) {
      const found = blend(before, seconds, 1 / (TRIAL_ROUNDS + 1 - this.trial));
      this.rounds.set(ahead, found);
      if (!--this.trial && MARGIN * found < this.rounds.get(!ahead)!) this.on = ahead;
    } else if (!this.fixed) {
      const usual = blend(before, seconds);
      const other = this.rounds.get(!ahead) ?? usual;
      this.rounds.set(ahead, usual);
      if (explorer.due("ahead", TRIAL_ROUNDS * Math.max(0, other - usual), other / usual)) this.trial = TRIAL_ROUNDS;
    }
  }
}
