/**
 * Lookup: what followed when the text, or an earlier one, last stood at the same few tokens.
 *
 * Copied names, quoted passages and repeated lines are cheap to foresee this way, from any distance and outside the draft
 * vocabulary; and so is an answer that is asked for again, or a form that this user's answers keep to. The drafter mixes
 * the guess into its own distribution; like any candidate it can only cost speed.
 */

/**
 * Share of positions where the guess after a longest match of 1, 2, ... tokens was the target's token, measured on 700 of
 * the default target's training answers.
 */
const HIT_RATES = [0.26, 0.53, 0.61, 0.66, 0.71, 0.84];
const LONGEST = HIT_RATES.length;

/**
 * Lengths of runs in earlier texts, and the same rates for them where the text itself has no guess that is as sure:
 * 600 of these answers, each behind those before it.
 */
const EARLIER_LENGTHS = [4, 8, 16];
const EARLIER_RATES = [0.35, 0.64, 0.8];
const EARLIER_LONGEST = 16;

/** Runs of earlier texts that are kept, those seen last; 8,192 tokens have as many. */
const MEMORY = 3 * 8192;

/** weight: the share of positions where such a guess is the target's token. */
export interface Guess {
  token: number;
  weight: number;
}

/** An index of every run of 1 to LONGEST tokens in a text that mostly grows at its end, and of earlier texts. */
export class Lookup {
  private text: number[] = [];
  /** A run of tokens -> the token that followed it last. */
  private readonly next = new Map<string, number>();
  /** The same of earlier texts, in the order they were last seen. */
  private readonly earlier = new Map<string, number>();

  constructor(private readonly memory = MEMORY) {}

  /** Bring the index to `text`; costs only what is new, or everything if the old text does not begin it. */
  follow(text: readonly number[]): void {
    if (this.text.some((token, index) => text[index] !== token)) {
      this.text = [];
      this.next.clear();
    }
    for (let end = this.text.length; end < text.length; end++) {
      for (let length = 1; length <= Math.min(LONGEST, end); length++) {
        this.next.set(text.slice(end - length, end).join(), text[end]);
      }
    }
    this.text = [...text];
  }

  /** Keep the runs of a text that is over, and forget the oldest ones of others beyond what fits. */
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

  /** The token behind the text and `path`, from the run that is the surest, and its hit rate; or null. */
  guess(path: readonly number[]): Guess | null {
    const own = this.ownGuess([...this.text.slice(-LONGEST), ...path].slice(-LONGEST));
    if (this.earlier.size === 0) return own;
    const tail = [...this.text.slice(-EARLIER_LONGEST), ...path].slice(-EARLIER_LONGEST);
    for (let at = EARLIER_LENGTHS.length - 1; at >= 0; at--) {
      const [length, weight] = [EARLIER_LENGTHS[at], EARLIER_RATES[at]];
      if (own && own.weight >= weight) break;
      const token = length <= tail.length ? this.earlier.get(tail.slice(-length).join()) : undefined;
      if (token !== undefined) return { token, weight };
    }
    return own;
  }

  private ownGuess(tail: readonly number[]): Guess | null {
    for (let length = tail.length; length > 0; length--) {
      const token = this.next.get(tail.slice(-length).join());
      if (token !== undefined) return { token, weight: HIT_RATES[length - 1] };
    }
    return null;
  }
}
