/** Collects the figures of one answer while it grows. */

import { clock } from "../clock.js";
import type { AnswerStats } from "../events.js";
import type { Link } from "../link/websocket.js";
import type { Session } from "../session/session.js";
import type { SessionStats } from "../session/transcript.js";

/** What a session counts itself. */
const COUNTED = [
  "rounds",
  "nodes",
  "chains",
  "calls",
  "streamed",
  "waitSeconds",
  "engineSeconds",
  "aheadRounds",
  "aheadHits",
  "aheadUsed",
  "provisional",
  "understudy",
  "kept",
  "rolledBack",
  "adopted",
  "stalls",
  "pauses",
  "opens",
] as const satisfies readonly (keyof SessionStats & keyof AnswerStats)[];

/** Times and bytes of one answer, and at its end all of its figures. */
export class Figures {
  private readonly began = clock();
  private readonly up: number;
  private readonly down: number;
  private stalledAt: number | null = null;
  private firstTokenSeconds = 0;
  private firstDraftSeconds = 0;
  private draftSeconds = 0;
  private aheadNodes = 0;
  private aheadSeconds = 0;
  private readonly stallSeconds: number[] = [];

  constructor(
    private readonly session: Session,
    private readonly link: Link | null,
  ) {
    this.up = link?.traffic.up ?? 0;
    this.down = link?.traffic.down ?? 0;
  }

  /** The target's tokens are there. */
  committed(): void {
    this.firstTokenSeconds ||= clock() - this.began;
  }

  /** A tree or a token came `seconds` after it was asked for. */
  drafted(seconds: number): void {
    this.firstDraftSeconds ||= seconds;
    this.draftSeconds += seconds;
  }

  /** `nodes` were expanded while a verdict was awaited. */
  draftedAhead(nodes: number, seconds: number): void {
    this.aheadNodes += nodes;
    this.aheadSeconds += seconds;
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

  /** All figures so far. */
  now(): AnswerStats {
    const { session, link } = this;
    const counted = Object.fromEntries(COUNTED.map(name => [name, session.stats[name]]));
    const { accepted, rounds, adopted } = session.stats;
    const tokens = session.committed.length - session.setup.prompt.length - adopted;
    const seconds = clock() - this.began;
    return {
      ...(counted as Pick<AnswerStats, (typeof COUNTED)[number]>),
      tokens,
      tau: rounds ? (accepted + rounds) / rounds : 0,
      seconds,
      tokensPerSecond: seconds ? tokens / seconds : 0,
      firstTokenSeconds: this.firstTokenSeconds,
      bytesUp: link ? link.traffic.up - this.up : 0,
      bytesDown: link ? link.traffic.down - this.down : 0,
      draftSeconds: this.draftSeconds,
      firstDraftSeconds: this.firstDraftSeconds,
      aheadNodes: this.aheadNodes,
      aheadSeconds: this.aheadSeconds,
      stallSeconds: [...this.stallSeconds],
    };
  }
}
