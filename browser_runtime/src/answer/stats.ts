/** Collects the statistics of one answer while it grows. */

import { clock } from "../clock.js";
import type { AnswerStats } from "../events.js";
import type { Link } from "../link/websocket.js";
import type { SessionStats } from "../session/stats.js";

/** Times and bytes of one answer, and with its session's counts its complete statistics. */
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

  /** Note tokens of the target. */
  committed(): void {
    this.measured.firstTokenSeconds ||= clock() - this.began;
  }

  /** Note a tree or a token that came `seconds` after its request. */
  drafted(seconds: number): void {
    this.measured.firstDraftSeconds ||= seconds;
    this.measured.draftSeconds += seconds;
  }

  /** Note that `nodes` were expanded while a verdict was awaited. */
  draftedAhead(nodes: number, seconds: number): void {
    this.measured.aheadNodes += nodes;
    this.measured.aheadSeconds += seconds;
  }

  /** Note a verdict that was due at `due` and did not come. */
  stalled(due: number): void {
    this.stalledAt = due;
  }

  /** Note that a provisional token is shown. */
  wrote(): void {
    if (this.stalledAt !== null) this.stallSeconds.push(clock() - this.stalledAt);
    this.stalledAt = null;
  }

  /** Note that the target answers again. */
  resumed(): void {
    this.stalledAt = null;
  }

  /** Return the statistics so far. counted: by the session. committed: the target's and adopted tokens. */
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
