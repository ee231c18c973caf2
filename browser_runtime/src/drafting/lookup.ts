/**
 * Lookup: guess the token that followed the same few tokens earlier in the text, or in an earlier one.
 *
 * It predicts copied names, quoted passages and repeated lines cheaply, at any distance and outside the draft vocabulary;
 * also an answer that is asked for again, or a form that this user's answers keep to. The drafter influences how likely such
 * a guess is; like any candidate it can only cost speed.
 */

/** Weight of the drafter's log-odds of a guess beside those of its hit rate, on text like its training data. */
const TRUST = 0.75;
/** Bounds of a drafter's probability of a guess before its log-odds are taken. */
const FAINTEST = 1e-9;
export const SUREST = 1 - 1e-6;

/**
 * Lengths of runs, and the share of positions where the guess after a run of that length, the longest one found, was the
 * target's token, measured on 700 of the default target's training answers.
 */
const LENGTHS = [1, 2, 3, 4, 5, 6, 16, 32];
const HIT_RATES = [0.21, 0.5, 0.57, 0.67, 0.72, 0.82, 0.93, 0.985];
const LONGEST = Math.max(...LENGTHS);

/**
 * Lengths of runs in earlier texts, and their rates if the text itself has no guess as sure: on 600 of these answers, each
 * after those before it.
 */
const EARLIER_LENGTHS = [4, 8, 16, 32];
const EARLIER_RATES = [0.32, 0.63, 0.7, 0.985];
const EARLIER_LONGEST = Math.max(...EARLIER_LENGTHS);

/** Runs of earlier texts that are kept, latest first; 8,192 tokens have this many. */
const MEMORY = 4 * 8192;

/** A possible next token. rate: how often such a guess is right. */
export interface Guess {
  token: number;
  rate: number;
}

/**
 * Return the probability that the guess comes next, if the drafter gives it `q`; undefined: unknown to it.
 *
 * It is the mean of two rules. For text like the drafter's training data, drafter and match are independent witnesses, whose
 * log-odds add up. For other text, the drafter's distribution only counts in case the guess is wrong.
 */
export function probability({ rate }: Guess, q: number | undefined): number {
  if (q === undefined) return rate;
  const apart = rate + (1 - rate) * q;
  const own = logOdds(Math.min(SUREST, Math.max(FAINTEST, q)));
  const together = 1 / (1 + Math.exp(-logOdds(rate) - TRUST * own));
  return Math.min(SUREST, 0.5 * (apart + together));
}

/** Return the log-odds of probability `p`. */
function logOdds(p: number): number {
  return Math.log(p / (1 - p));
}

/** An index of the runs of LENGTHS in a text that mostly grows at its end, and of those in earlier texts. */
export class Lookup {
  private text: number[] = [];
  /** Run of tokens -> the token that last followed it. */
  private readonly next = new Map<string, number>();
  /** The same for earlier texts, in the order they were last seen. */
  private readonly earlier = new Map<string, number>();

  constructor(private readonly memory = MEMORY) {}

  /** Bring the index to `text`; costs only the new part, or everything if the old text is not its beginning. */
  follow(text: readonly number[]): void {
    if (this.text.some((token, index) => text[index] !== token)) {
      this.text = [];
      this.next.clear();
    }
    for (let end = this.text.length; end < text.length; end++) {
      for (const length of LENGTHS) {
        if (length <= end) this.next.set(text.slice(end - length, end).join(), text[end]);
      }
    }
    this.text = [...text];
  }

  /** Keep the runs of a finished text, and forget the oldest ones of others beyond the limit. */
  remember(text: readonly number[]): void {
    for (let end = 0; end < text.length; end++) {
      for (const length of EARLIER_LENGTHS) {
        if (length > end) break;
        const run = text.slice(end - length, end).join();
        this.earlier.delete(run); // to the end of the order
        this.earlier.set(run, text[end]);
      }
    }
    for (const run of this.earlier.keys()) {
      if (this.earlier.size <= this.memory) break;
      this.earlier.delete(run);
    }
  }

  /** Forget the text and all earlier ones. */
  forget(): void {
    this.text = [];
    this.next.clear();
    this.earlier.clear();
  }

  /** Return the guess after the text and `path` with the highest rate; or null. */
  guess(path: readonly number[]): Guess | null {
    const own = this.ownGuess([...this.text.slice(-LONGEST), ...path].slice(-LONGEST));
    if (this.earlier.size === 0) return own;
    const tail = [...this.text.slice(-EARLIER_LONGEST), ...path].slice(-EARLIER_LONGEST);
    for (let at = EARLIER_LENGTHS.length - 1; at >= 0; at--) {
      const [length, rate] = [EARLIER_LENGTHS[at], EARLIER_RATES[at]];
      if (own && own.rate >= rate) break;
      const token = length <= tail.length ? this.earlier.get(tail.slice(-length).join()) : undefined;
      if (token !== undefined) return { token, rate };
    }
    return own;
  }

  private ownGuess(tail: readonly number[]): Guess | null {
    for (let at = LENGTHS.length - 1; at >= 0; at--) {
      const token = LENGTHS[at] <= tail.length ? this.next.get(tail.slice(-LENGTHS[at]).join()) : undefined;
      if (token !== undefined) return { token, rate: HIT_RATES[at] };
    }
    return null;
  }
}
