/**
 * Whether to continue drafting while waiting for a verdict: a flag of the arm of trees, tried and kept if it pays.
 *
 * It hides drafting time. But if device and verifier share processors, it slows the step being waited for.
 */

import { EVERY, type Explorer, MARGIN } from "./explorer.js";

/** Rounds of a trial. */
const TRIAL_ROUNDS = 3;

/** fixed: never try the other choice. Seconds. */
export class Ahead {
  /** The current choice. */
  private on = false;
  /** A trial is under way. */
  trying = false;
  /** What the last trial lost, and how many times as long its rounds were. */
  private lost = 0;
  private behind = 1;
  private kept: number[] = [];
  private tried: number[] = [];

  constructor(public fixed = false) {}

  /** Whether this round drafts ahead. */
  get now(): boolean {
    return this.on !== this.trying;
  }

  /** A round took so long, drafted ahead or not. */
  measured(ahead: boolean, seconds: number, explorer: Explorer): void {
    if (ahead !== this.now) {
      this.givenUp();
    } else if (!this.trying) {
      this.kept = [...this.kept, seconds].slice(-EVERY);
      this.trying = !this.fixed && explorer.due("ahead", this.lost, this.behind);
    } else {
      this.tried.push(seconds);
      if (this.tried.length === TRIAL_ROUNDS) this.ended(median(this.tried), median(this.kept));
    }
  }

  /** A round cannot be told from others: a trial begins again later. */
  givenUp(): void {
    this.trying = false;
    this.tried = [];
  }

  private ended(found: number, usual: number): void {
    this.lost = TRIAL_ROUNDS * Math.max(0, found - usual);
    this.behind = found / usual;
    if (MARGIN * found < usual) {
      this.on = !this.on;
      this.kept = this.tried;
    }
    this.givenUp();
  }
}

function median(seconds: readonly number[]): number {
  const values = seconds.toSorted((a, b) => a - b);
  const middle = Math.floor(values.length / 2);
  return values.length % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}
