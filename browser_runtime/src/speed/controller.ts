/** Tree or stream: whichever promises more tokens per second, with hysteresis. */

import { Pace } from "./pace.js";

/** How the device uses the target: to verify draft trees, or to write by itself. */
export type Mode = "tree" | "stream";

/**
 * Beside a stream, trees are drafted for comparison. Beside trees, only the verifier's curve tells how long a stream's
 * tokens take, and the curve may be wrong: so now and then, where a stream could be the better mode, one is tried.
 */
export class Controller {
  mode: Mode = "tree";
  private trials = 0;
  /** Tokens left of the trial under way. */
  private trial = 0;
  private better = 0;
  /** Seconds that a trial may cost. */
  private saved = 0;

  /** pinned: always this one. */
  constructor(
    readonly pace = new Pace(),
    public pinned: Mode | null = null,
  ) {}

  /**
   * The mode of an answer: trees, unless a stream is faster by the margin in answers of usual length.
   *
   * unknown: nothing tells of this answer yet; otherwise it goes on, on a new link, without hysteresis.
   */
  begin(unknown = true): Mode {
    const { config } = this.pace;
    if (!unknown) {
      this.better = config.tokensToLeaveStream;
      return this.choose();
    }
    if (this.trial) this.mode = "tree";
    this.trial = this.better = 0;
    this.pace.forgetAnswer();
    const stream = this.pace.streamRate();
    const least = this.pace.uneven ? config.worthBeginning : config.margin;
    if (this.pinned === null && stream !== null)
      this.mode = stream > least * this.pace.usualDraftRate() ? "stream" : "tree";
    return this.pinned ?? this.mode;
  }

  /** After every verdict. */
  choose(): Mode {
    if (this.pinned) return this.pinned;
    const { config } = this.pace;
    const [stream, tree] = [this.pace.streamRate(), this.pace.draftRate()];
    if (stream === null) return this.mode;
    if (this.trial) {
      this.trial--;
      if (!this.trial) this.endTrial(stream > config.margin * tree);
      return this.mode;
    }
    const inTrees = this.mode === "tree";
    const [now, other] = inTrees ? [tree, stream] : [stream, this.pace.usualDraftRate()];
    this.better = other > config.margin * now ? this.better + 1 : 0;
    if (this.better >= (inTrees ? config.roundsToLeaveTrees : config.tokensToLeaveStream)) {
      this.mode = inTrees ? "stream" : "tree";
      this.better = 0;
    } else if (inTrees && stream > config.worthATrial * tree) {
      this.maybeTry();
    }
    return this.mode;
  }

  /** Begin a trial if enough was saved for it. */
  private maybeTry(): void {
    const { config } = this.pace;
    this.saved += config.trialShare * this.pace.round();
    if (this.saved <= this.pace.trialCost() * 2 ** Math.min(this.trials, config.trialHalvings)) return;
    this.mode = "stream";
    this.trial = config.trialTokens;
    this.saved = 0;
    this.trials++;
  }

  private endTrial(better: boolean): void {
    this.better = 0;
    if (!better) this.mode = "tree";
  }
}
