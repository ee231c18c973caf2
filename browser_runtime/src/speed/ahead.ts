/**
 * Whether to continue drafting while waiting for a verdict: tried for a few rounds now and then, and kept if it pays.
 *
 * It hides drafting time. But if device and verifier share processors, it slows the step being waited for.
 */

/** Rounds of a trial, and measured rounds before the first one. */
const TRIAL_ROUNDS = 4;
/** After so many, all of them longer than usual by this factor, a trial ends. */
const SURE_ROUNDS = 2;
const HOPELESS = 1.25;
/** Rounds between trials, at least and at most. */
const OFTEN = 24;
const RARELY = 400;
/** Share of the time between two trials that the first of them may have lost. */
const TRIAL_SHARE = 0.02;
/** Rounds outside of trials that a trial is compared with. */
const COMPARED = 8;
/** The rounds tried must be shorter by this factor. */
const MARGIN = 1.03;

/**
 * A round of trees in seconds, but for `stretch`: the step's time over the advertised one. exposed: between a verdict and
 * the next VERIFY. between: of the wait, what was neither the engine nor its queue.
 */
export interface Round {
  exposed: number;
  between: number;
  stretch: number;
}

export class Ahead {
  private until = TRIAL_ROUNDS; // rounds until the next trial
  private kept: Round[] = [];
  private tried: Round[] = [];

  /** on: the way that is kept. fixed: there is no choice, so that nothing is tried. */
  constructor(
    public fixed = false,
    public on = false,
  ) {}

  /** Whether a trial is under way. */
  get trying(): boolean {
    return this.until <= 0 && !this.fixed;
  }

  /** Whether this round drafts ahead. */
  get now(): boolean {
    return this.on !== this.trying;
  }

  /**
   * A round was drafted ahead, or not. step: seconds of an advertised step for a tree as they are. Returns what rounds
   * are like from now on, where a trial has ended that showed them to be shorter.
   */
  measured(ahead: boolean, round: Round, step: number): Round | null {
    if (ahead !== this.now) {
      this.givenUp();
    } else if (!this.trying) {
      this.until--;
      this.kept = [...this.kept, round].slice(-COMPARED);
    } else {
      this.tried.push(round);
      if (this.tried.length === TRIAL_ROUNDS || this.hopeless(step)) return this.ended(step);
    }
    return null;
  }

  /** A round cannot be told from others: a trial begins again later. */
  givenUp(): void {
    if (!this.trying) return;
    this.until = TRIAL_ROUNDS;
    this.tried = [];
  }

  private hopeless(step: number): boolean {
    const best = Math.min(...this.tried.map(round => secondsOf(round, step)));
    return this.tried.length >= SURE_ROUNDS && best > HOPELESS * secondsOf(medians(this.kept), step);
  }

  private ended(step: number): Round | null {
    const [found, usual] = [medians(this.tried), secondsOf(medians(this.kept), step)];
    const lost = this.tried.length * (secondsOf(found, step) - usual);
    this.until = Math.max(OFTEN, Math.min(RARELY, Math.ceil(lost / (TRIAL_SHARE * usual))));
    const better = MARGIN * secondsOf(found, step) < usual;
    if (better) [this.on, this.kept] = [!this.on, this.tried];
    this.tried = [];
    return better ? found : null;
  }
}

function secondsOf({ exposed, between, stretch }: Round, step: number): number {
  return exposed + between + stretch * step;
}

function medians(rounds: readonly Round[]): Round {
  const median = (of: keyof Round) => {
    const values = rounds.map(round => round[of]).sort((one, other) => one - other);
    const middle = values.length >> 1;
    return values.length % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  };
  return { exposed: median("exposed"), between: median("between"), stretch: median("stretch") };
}
