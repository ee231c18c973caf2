/** Time limits of the device. Seconds on any monotonic clock. */

/** Time until a reply is overdue: smoothed round time plus four deviations (as TCP does, RFC 6298). */
export class RoundTimer {
  private smoothed: number | null = null;
  private deviation = 0;

  /** first: before any measurement. */
  constructor(
    readonly floor = 0.25,
    readonly ceiling = 3,
    readonly first = 2,
  ) {}

  add(seconds: number): void {
    if (this.smoothed === null) {
      this.smoothed = seconds;
      this.deviation = seconds / 2;
      return;
    }
    this.deviation += 0.25 * (Math.abs(seconds - this.smoothed) - this.deviation);
    this.smoothed += 0.125 * (seconds - this.smoothed);
  }

  timeout(): number {
    if (this.smoothed === null) return this.first;
    return Math.min(this.ceiling, Math.max(this.floor, this.smoothed + 4 * this.deviation));
  }
}

/**
 * Limits in seconds. open: extra time for a verdict right after OPEN, when the server may have to prefill the whole
 * conversation; connect: wait of a new answer for a first link; silence: time past the deadline before a silent link is
 * replaced; offline: wait of an answer for the target once offline writing has stopped.
 */
export interface Patience {
  open: number;
  connect: number;
  silence: number;
  offline: number;
}

export const PATIENCE: Patience = { open: 3, connect: 1, silence: 1, offline: 300 };
