/**
 * What each arm brings: tokens per second by what is known of it and by the cost model. Seconds and tokens.
 *
 * A round of trees commits 1 + (sum of the sent nodes' acceptance probabilities) tokens. A chain of k tokens, each right with
 * probability a, commits (1 - a^(k+1)) / (1 - a). A stream commits one token per step, or several by lookup.
 */

import { argmax } from "../protocol/sampling.js";
import type { TokenTree } from "../protocol/tree.js";
import { blend, type CostModel, LEAST_SECONDS, OUTLIER, PRIOR, SMOOTHING, USUAL } from "./costModel.js";

/** What an older observation still counts after one more. */
const FADING = 0.98;
/** Levels of a tree that are calibrated separately; deeper ones count as the last. */
const DEPTHS = 6;
/** Weight in what is usual of a streamed token: one says less than a round. */
const USUAL_TOKEN = 0.01;
/** Weight of what a tree's nodes promised in the tokens that it is taken to bring, next to those that came true. */
const PROMISED = 0.7;
/** Tokens that a round of trees is taken to bring before one was seen, and drafting steps that it takes. */
const PRIOR_TAU = 3;
export const PRIOR_STEPS = 4;
/** Tokens that a step of a stream is taken to bring if the verifier does not know. */
const PRIOR_STREAM = 1.25;
/** Nodes that are drafted in any case, and nodes drafted per node that was worth sending in earlier trees. */
const LEAST_NODES = 16;
const SPARE = 2;
/**
 * Tokens of a chain at most, and of the first, by which chains are known; how likely a token is taken to be right at first,
 * and at most.
 */
export const MOST_TOKENS = 16;
export const FIRST_TOKENS = 4;
const PRIOR_RIGHT = 0.7;
const MOST_RIGHT = 0.99;

/**
 * How the device uses the target. tree: to verify trees of the drafter. chain: to verify chains of the understudy.
 * stream: to write alone.
 */
export type Arm = "tree" | "chain" | "stream";

/** Trees of the drafter. */
export class TreeArm {
  /** Tokens of a round in this answer; in the answers so far, by so many `trees`. */
  tau = PRIOR_TAU;
  usualTau = PRIOR_TAU;
  private trees = 0;
  /** Of a tree. */
  nodes = LEAST_NODES;
  /** Seconds of a drafting step. */
  step: number | null = null;
  /** Accepted nodes by depth: as the drafter predicted them, and as they came. */
  private predicted: number[] = Array(DEPTHS + 1).fill(1);
  private accepted: number[] = [...this.predicted];

  /** A tree was drafted. */
  drafted(seconds: number, steps: number): void {
    if (steps) this.step = blend(this.step, this.usual(seconds, steps) / steps);
  }

  /** Of `seconds` that drafting in `steps` steps took, those that say something of the next round. */
  usual(seconds: number, steps: number): number {
    return this.step ? Math.min(seconds, OUTLIER * steps * this.step) : seconds;
  }

  /** Of `tree`, `path` nodes came true. tau is what its nodes promise, calibrated: that varies less than luck. */
  learn(tree: TokenTree, scores: readonly number[], path: number): void {
    this.nodes = blend(this.trees ? this.nodes : null, tree.size);
    this.trees++;
    let tokens = 1 + path;
    if (scores.length && scores.length === tree.size) {
      const faded = (known: number[]) => known.map(each => 1 + FADING * (each - 1));
      [this.predicted, this.accepted] = [faded(this.predicted), faded(this.accepted)];
      for (const [node, score] of scores.entries()) {
        this.predicted[Math.min(tree.depths[node], DEPTHS)] += Math.exp(score);
      }
      for (let depth = 1; depth <= path; depth++) this.accepted[Math.min(depth, DEPTHS)]++;
      tokens += PROMISED * (this.expected(tree, scores).at(-1)! - tokens);
    }
    this.tau = blend(this.tau, tokens, Math.max(SMOOTHING, 1 / (1 + this.trees)));
    this.usualTau = blend(this.usualTau, tokens, Math.max(USUAL, 1 / (1 + this.trees)));
  }

  /** Tokens that the first 1, 2, ... nodes of `tree` promise, as far as promises were kept so far. */
  private expected(tree: TokenTree, scores: readonly number[]): number[] {
    let tokens = 1;
    return scores.map((score, node) => {
      const depth = Math.min(tree.depths[node], DEPTHS);
      tokens += Math.min(1, Math.exp(score) * (this.accepted[depth] / this.predicted[depth]));
      return tokens;
    });
  }

  rate(costs: CostModel): number {
    return this.tau / costs.round(this.nodes);
  }

  /** Accepted tokens that one more drafting step must promise to be worth its time; null: nothing tells. */
  gain(costs: CostModel): number | null {
    return this.step === null ? null : this.rate(costs) * this.step;
  }

  /** Nodes to draft of the next tree, so that there is a choice of what to send. */
  worthDrafting(): number {
    return Math.max(LEAST_NODES, Math.ceil(SPARE * this.nodes));
  }

  /** How many nodes of `tree`, best first, make most tokens per second; scores: log path probabilities. */
  worthSending(tree: TokenTree, scores: readonly number[], costs: CostModel): number {
    if (!scores.length) return tree.size;
    const tokens = this.expected(tree, scores);
    return 1 + argmax(tokens.map((each, node) => each / costs.round(1 + node)));
  }
}

/**
 * Chains of tokens that the understudy drafts. While one is verified the understudy continues: it guesses the target's next
 * token, and drafts behind it. If all of the chain was right, and so was the guess, that is kept.
 */
export class ChainArm {
  /** The understudy has read along, and may draft. */
  ready = false;
  /** Tokens that the verifier takes at most. */
  most = MOST_TOKENS;
  /** Seconds that the understudy takes for one; null: it has drafted none yet. */
  token: number | null = null;
  private right = PRIOR * PRIOR_RIGHT;
  private judged = PRIOR;

  /** `tokens` were drafted in `seconds`. */
  drafted(tokens: number, seconds: number): void {
    if (tokens) this.token = blend(this.token, seconds / tokens);
  }

  /** Of a chain of `tokens`, the first `accepted` were right. */
  verified(tokens: number, accepted: number): void {
    for (let token = 0; token < Math.min(tokens, accepted + 1); token++) {
      this.judged = 1 + FADING * this.judged;
      this.right = (token < accepted ? 1 : 0) + FADING * this.right;
    }
  }

  /** The length of the chain that brings most tokens per second, and these; FIRST_TOKENS, 0 where nothing is known. */
  best(costs: CostModel): { length: number; rate: number } {
    let [length, rate] = [1, 0];
    if (this.token === null) return { length: FIRST_TOKENS, rate };
    const right = Math.min(MOST_RIGHT, this.right / this.judged);
    for (let count = 1; count <= Math.min(this.most, MOST_TOKENS); count++) {
      const allRight = right ** (count + 1);
      const [waiting, drafting] = [costs.between + costs.step(count), count * this.token];
      const hidden = Math.min(Math.max(0, waiting - this.token), drafting);
      const seconds = Math.max(LEAST_SECONDS, waiting + drafting - allRight * hidden);
      const tokens = (1 - allRight) / (1 - right);
      if (tokens > rate * seconds) [length, rate] = [count, tokens / seconds];
    }
    return { length, rate };
  }
}

/** A stream of the target. */
export class StreamArm {
  /** Share of the tokens that begin a step, the others come of lookup; at first as WELCOME has it. */
  first = 1;
  /** The same in the answers so far, of so many `tokens`. */
  usual = 1;
  tokens = 0;
  /** Seconds between tokens besides the engine. */
  private rest = 0;

  /** WELCOME says that a step brings so many tokens. */
  told(tokens: number): void {
    if (!this.tokens) this.first = this.usual = 1 / Math.max(1, tokens || PRIOR_STREAM);
  }

  /** A token came `gap` after the one before it. engine: 0: unknown. Many follow a late one at once. */
  came(gap: number, engine: number, sameStep: boolean): void {
    const [begins, early] = [sameStep ? 0 : 1, 1 / (PRIOR + this.tokens)];
    this.first = blend(this.first, begins, Math.max(USUAL, early));
    this.usual = blend(this.usual, begins, Math.max(USUAL_TOKEN, early));
    this.tokens++;
    const rest = engine ? Math.min(gap - engine, OUTLIER * Math.max(engine, this.rest)) : gap;
    this.rest = blend(this.rest, rest, Math.max(USUAL_TOKEN, 1 / this.tokens));
  }

  /** Tokens per second; null where nothing is known. */
  rate(costs: CostModel): number | null {
    if (!costs.curve && costs.tokenSlowdown === null && !this.tokens) return null;
    return 1 / Math.max(LEAST_SECONDS, this.first * costs.step(0) + Math.max(0, this.rest));
  }
}
