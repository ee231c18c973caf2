/** Time limits of the device. Seconds on any monotonic clock. */

/** Time until a reply is overdue: smoothed round time plus four deviations (as TCP does, RFC 6298). */
export class RoundTimer {
  private smoothed: number | null = null;
  private deviation = 0;

  /** first: before anything was measured. */
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
 * Seconds. open: allowance for a verdict right behind OPEN, when the server may have to read the whole conversation first;
 * connect: how long a new answer waits for a first link; silence: how long past the deadline a silent link is waited for
 * before another is made; offline: how long an answer that cannot go on waits for the target.
 */
export interface Patience {
  open: number;
  connect: number;
  silence: number;
  offline: number;
}

export const PATIENCE: Patience = { open: 3, connect: 1, silence: 1, offline: 300 };
