/** The drafter on its own: whether it may write, and why not. */

import type { Policy } from "./policy.js";
import type { PauseReason } from "./states.js";

/** Tokens over which the drafter's confidence is averaged. */
const CONFIDENCE_WINDOW = 8;

/** What the policy allows the drafter to write without the target. */
export class Solo {
  /** The target is silent. */
  alone = false;
  paused: PauseReason | null = null;
  private confidence: number[] = [];

  constructor(private readonly policy: Policy) {}

  /** The drafter writes without waiting for the target. */
  get writesFirst(): boolean {
    return (this.policy.writer === "prefer-device" || this.policy.writer === "device-only") && !this.paused;
  }

  /** Nothing is written alone, whatever happens to the link. */
  get mute(): boolean {
    return this.paused !== null || this.policy.writer === "cloud-only";
  }

  /** The drafter writes while the target may come back. */
  get mayBeTakenBack(): boolean {
    return this.alone && this.policy.writer !== "device-only";
  }

  /** Whether another token may follow `provisional` unverified ones. */
  mayWrite(provisional: number): boolean {
    if (this.mute) return false;
    if (this.policy.writer === "prefer-device" && !this.alone) return provisional < this.policy.lead;
    return this.alone;
  }

  /** A token of probability `confidence` was written: whether the policy wants a pause now. */
  doubts(confidence: number): boolean {
    this.confidence = [...this.confidence, confidence].slice(-CONFIDENCE_WINDOW);
    const mean = this.confidence.reduce((sum, one) => sum + one, 0) / this.confidence.length;
    const sure = this.confidence.length < CONFIDENCE_WINDOW || mean >= this.policy.minConfidence;
    return !sure && this.policy.offline === "pause";
  }

  /** Somebody asked to go on. */
  proceed(): void {
    this.paused = null;
    this.confidence = [];
  }

  /** The target answers again; a pause that somebody asked for stays. */
  targetIsBack(): void {
    this.alone = false;
    if (this.paused === "unsure") this.paused = null;
    this.confidence = [];
  }
}
