/**
 * Chains of tokens that the understudy drafts instead of the drafter's trees: how much they gain, and when to use one.
 *
 * A chain of k tokens, each right with probability a, commits (1 - a^(k+1)) / (1 - a) tokens. While it is verified the
 * understudy continues: if all of it was right, and so was its guess of the target's next token, the next chain is
 * ready at once. Seconds throughout.
 */

/** Tokens of a chain at most, and of the first, by which chains are known. */
export const MOST_TOKENS = 16;
export const FIRST_TOKENS = 4;
/** Tokens' worth of the belief that chains begin with, and how likely a token of theirs is taken to be right. */
const PRIOR_TOKENS = 4;
const PRIOR_RIGHT = 0.7;
/** What an older token still counts after one more. */
const FADING = 0.98;
/** No token is taken to be surer than this. */
const MOST_RIGHT = 0.99;
/** Weight of the newest chain in what a token takes. */
const SMOOTHING = 0.2;
/** Rounds of trees until chains that were not worth it are tried again: doubled each time, at most so many times. */
const TRY_AGAIN = 32;
const DOUBLINGS = 4;
/** No round is taken to be shorter, so that rates stay finite. */
const LEAST_SECONDS = 1e-4;
/** Chains between two trees drafted beside them, for comparison. */
const COMPARE_EVERY = 4;

/** The length of a chain, and tokens per second. */
export interface BestChain {
  length: number;
  rate: number;
}

/** Smoothed measurements; they outlive answers. */
export class Chains {
  /** The understudy has read along, and may draft. */
  ready = false;
  /** Tokens that the verifier takes at most. */
  most = MOST_TOKENS;
  /** Seconds that the understudy takes for a token; null: it has drafted none yet. */
  private token: number | null = null;
  private right = PRIOR_TOKENS * PRIOR_RIGHT;
  private judged = PRIOR_TOKENS;
  /** Times that they were tried and not worth it, and rounds since they were. */
  private tried = 0;
  private waited = 0;
  /** Chains so far. */
  private asked = 0;

  /** They were tried, so that `best` tells something. */
  get known(): boolean {
    return this.ready && this.most > 1 && this.token !== null;
  }

  /** `tokens` were drafted in `seconds`. */
  drafted(tokens: number, seconds: number): void {
    if (!tokens) return;
    const each = seconds / tokens;
    this.token = this.token === null ? each : this.token + SMOOTHING * (each - this.token);
  }

  /** Of a chain of `tokens`, the first `accepted` were right. */
  verified(tokens: number, accepted: number): void {
    for (let token = 0; token < Math.min(tokens, accepted + 1); token++) {
      this.judged = 1 + FADING * this.judged;
      this.right = (token < accepted ? 1 : 0) + FADING * this.right;
    }
  }

  /**
   * The chain that brings most tokens per second, once they are known.
   *
   * between: a round's time without drafting and the verifier's engine. step: that of a tree of so many nodes.
   */
  best(between: number, step: (nodes: number) => number): BestChain {
    const right = Math.min(MOST_RIGHT, this.right / this.judged);
    let [length, rate] = [1, 0];
    for (let count = 1; count <= Math.min(this.most, MOST_TOKENS); count++) {
      const allRight = right ** (count + 1);
      const [waiting, drafting] = [between + step(count), count * this.token!];
      const seconds = Math.max(LEAST_SECONDS, waiting + drafting - allRight * Math.min(waiting, drafting));
      const tokens = (1 - allRight) / (1 - right);
      if (tokens > rate * seconds) [length, rate] = [count, tokens / seconds];
    }
    return { length, rate };
  }

  /** Whether to try one in place of the next tree, as nothing is known of them, or not of late. */
  tryNow(): boolean {
    if (!this.ready) return false;
    this.waited++;
    const again = this.token !== null;
    if (again && this.waited < TRY_AGAIN * 2 ** Math.min(this.tried, DOUBLINGS)) return false;
    if (again) this.tried++;
    this.waited = 0;
    return true;
  }

  /** They are worth it at present. */
  chosen(): void {
    this.tried = this.waited = 0;
  }

  /** Whether to draft a tree beside the chain that is asked for now. */
  compares(): boolean {
    this.asked++;
    return this.asked % COMPARE_EVERY === 1;
  }
}
