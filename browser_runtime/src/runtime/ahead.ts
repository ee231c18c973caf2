/**
 * Whether to draft on while a verdict is awaited: tried for a few rounds now and then, and kept where it pays.
 *
 * It hides drafting. But where device and verifier share processors, it slows the very step that is awaited.
 */

/** Rounds of a trial, and measured rounds before the first one. */
const TRIAL_ROUNDS = 4;
/** Rounds between trials: at least so many, and twice as many after each trial that changed nothing, up to so many. */
const OFTEN = 24;
const RARELY = 192;

export class Ahead {
  trying = false;
  private until = TRIAL_ROUNDS; // rounds until the next trial
  private pause = OFTEN;
  private rounds: { exposed: number; stretch: number }[] = [];

  /** on: the way that is kept. fixed: there is no choice, so that nothing is tried. */
  constructor(
    public fixed = false,
    public on = false,
  ) {}

  /** Whether this round drafts ahead. */
  get now(): boolean {
    return this.on !== this.trying;
  }

  /** A round was measured as rounds are now. */
  kept(): void {
    this.until--;
    this.trying = this.until <= 0 && !this.fixed;
  }

  /**
   * A round of a trial: seconds of exposed drafting, and the step's time over the advertised one. Returns the means of
   * both at the trial's end, for `ended` to be told what they are worth.
   */
  tried(exposed: number, stretch: number): { exposed: number; stretch: number } | null {
    this.rounds.push({ exposed, stretch });
    if (this.rounds.length < TRIAL_ROUNDS) return null;
    const mean = (of: "exposed" | "stretch") => this.rounds.reduce((sum, round) => sum + round[of], 0) / TRIAL_ROUNDS;
    return { exposed: mean("exposed"), stretch: mean("stretch") };
  }

  /** Whether the rounds tried were the shorter ones. */
  ended(better: boolean): void {
    this.on = this.on !== better;
    this.until = this.pause = better ? OFTEN : Math.min(2 * this.pause, RARELY);
    this.trying = false;
    this.rounds = [];
  }
}
