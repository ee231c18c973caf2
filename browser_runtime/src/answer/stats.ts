/** Collects the statistics of one answer while it grows. */

import { clock } from "../clock.js";
import type { AnswerStats } from "../events.js";
import type { Link } from "../link/websocket.js";
import type { SessionStats } from "../session/stats.js";

/** Times and bytes of one answer, and with what its session counts, all of its statistics. */
export class StatsRecorder {
  private readonly began = clock();
  private readonly up: number;
  private readonly down: number;
  private stalledAt: number | null = null;
  private readonly stallSeconds: number[] = [];
  private readonly measured = {
    firstTokenSeconds: 0,
    firstDraftSeconds: 0,
    draftSeconds: 0,
    aheadNodes: 0,
    aheadSeconds: 0,
  };

  constructor(private readonly link: Link | null) {
    this.up = link?.traffic.up ?? 0;
    this.down = link?.traffic.down ?? 0;
  }

  /** The target's tokens are there. */
  committed(): void {
    this.measured.firstTokenSeconds ||= clock() - this.began;
  }

  /** A tree or a token came `seconds` after it was asked for. */
  drafted(seconds: number): void {
    this.measured.firstDraftSeconds ||= seconds;
    this.measured.draftSeconds += seconds;
  }

  /** `nodes` were expanded while a verdict was awaited. */
  draftedAhead(nodes: number, seconds: number): void {
    this.measured.aheadNodes += nodes;
    this.measured.aheadSeconds += seconds;
  }

  /** A verdict that was due at `due` did not come. */
  stalled(due: number): void {
    this.stalledAt = due;
  }

  /** A provisional token is shown. */
  wrote(): void {
    if (this.stalledAt !== null) this.stallSeconds.push(clock() - this.stalledAt);
    this.stalledAt = null;
  }

  /** The target answers again. */
  resumed(): void {
    this.stalledAt = null;
  }

  /** All statistics so far. counted: by the session. committed: tokens of the target, and those that were adopted. */
  now(counted: SessionStats, committed: number): AnswerStats {
    const { accepted, rounds, adopted } = counted;
    const tokens = committed - adopted;
    const seconds = clock() - this.began;
    return {
      ...counted,
      ...this.measured,
      stallSeconds: [...this.stallSeconds],
      tokens,
      tau: rounds ? (accepted + rounds) / rounds : 0,
      seconds,
      tokensPerSecond: seconds ? tokens / seconds : 0,
      bytesUp: this.link ? this.link.traffic.up - this.up : 0,
      bytesDown: this.link ? this.link.traffic.down - this.down : 0,
    };
  }
}
