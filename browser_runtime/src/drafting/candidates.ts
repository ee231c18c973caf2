/** Ranks possible children of a tree's nodes: the drafter's distribution, lookup's guess and the noise of the draw. */

import { Noise } from "../protocol/noise.js";
import { argmax, normalise, type Sampling } from "../protocol/sampling.js";
import { type Guess, type Lookup, probability, SUREST } from "./lookup.js";
import { largest, likeliest } from "./select.js";

/** Children kept of an expanded node: at least this many, up to CHILDREN if a verdict is likely to end there. */
const LEAST_CHILDREN = 16;
const CHILDREN = 64;
const LIKELY_CHILD = Math.log(0.002);
/** Likeliest tokens of a node that noise may reorder; less likely ones are left out. */
const CANDIDATES = 512;

/** A possible child of a node, and its log-probability; with sampling: among all candidates, given the noise. */
export interface Candidate {
  token: number;
  logProb: number;
}

/** The best children of a node, best first; likeliest: the token that comes first before noise is added. */
export interface Children {
  best: Candidate[];
  likeliest: number;
}

export class Candidates {
  /** Token id -> row of the LM head. */
  private readonly columns: Map<number, number>;
  /** Scratch [draftVocab]: the logits of one row over the temperature. */
  private readonly x: Float32Array;

  constructor(
    private readonly draftIds: ArrayLike<number>,
    private readonly lookup: Lookup | null,
    private readonly confidenceTemperature: number,
  ) {
    this.columns = new Map(Array.from(draftIds, (token, column) => [token, column]));
    this.x = new Float32Array(draftIds.length);
  }

  /**
   * Return the best children, best first, of row `row` of `logits` [n, draftVocab].
   *
   * path: tokens below the root; position: of the token that is proposed; amounts: added to logits, by token.
   */
  best(
    logits: Float32Array,
    row: number,
    path: readonly number[],
    position: number,
    sampling: Sampling,
    amounts: ReadonlyMap<number, number> = new Map(),
  ): Children {
    const { x, draftIds } = this;
    const vocab = draftIds.length;
    const scale = Math.fround(this.temperature(sampling));
    for (let column = 0; column < vocab; column++) x[column] = logits[row * vocab + column];
    for (const [token, amount] of amounts) {
      const column = this.columns.get(token);
      if (column !== undefined) x[column] += amount;
    }
    let high = Number.NEGATIVE_INFINITY;
    for (let column = 0; column < vocab; column++) {
      x[column] /= scale;
      if (x[column] > high) high = x[column];
    }
    let sum = 0;
    for (let column = 0; column < vocab; column++) sum += Math.exp(x[column] - high);
    const total = high > Number.NEGATIVE_INFINITY ? high + Math.log(sum) : 0;
    const likely = likeliest(x, high, Math.min(sampling.greedy ? CHILDREN : CANDIDATES, vocab));
    // one place more than candidates, for a guess that is not one of the drafter's
    const ids = likely.map(column => draftIds[column]).concat(draftIds[0]);
    const scores = new Float64Array(ids.length).fill(Number.NEGATIVE_INFINITY);
    for (const [index, column] of likely.entries()) scores[index] = x[column] - total;
    const guess = this.lookup?.guess(path);
    if (guess) this.mix(guess, ids, scores, total);
    const foremost = ids[argmax(scores)];
    if (!sampling.greedy) perturb(scores, ids, new Noise(sampling.seed, position));
    const best = largest(scores, Math.min(CHILDREN, vocab)).sort((one, other) => scores[other] - scores[one]);
    const possible = best.filter(place => scores[place] > Number.NEGATIVE_INFINITY);
    const known = possible.filter((place, rank) => rank < LEAST_CHILDREN || scores[place] > LIKELY_CHILD);
    return { best: known.map(place => ({ token: ids[place], logProb: scores[place] })), likeliest: foremost };
  }

  /** Return the divisor of logits; for greedy decoding, probabilities then tell how often a token is chosen. */
  temperature(sampling: Sampling): number {
    return sampling.greedy ? this.confidenceTemperature : sampling.temperature;
  }

  /** Return the row of `token` in the LM head. */
  columnOf(token: number): number | undefined {
    return this.columns.get(token);
  }

  /**
   * Mix a guess into `scores`: it gets the probability of `probability`, the drafter's other tokens share the rest. The last
   * place is for a guess that is not a candidate of the drafter.
   */
  private mix(guess: Guess, ids: number[], scores: Float64Array, total: number): void {
    const column = this.columns.get(guess.token);
    const q = column === undefined ? undefined : Math.exp(this.x[column] - total);
    const p = probability(guess, q);
    const rest = Math.log1p(-p) - Math.log1p(-Math.min(SUREST, q ?? 0));
    for (let index = 0; index < scores.length; index++) scores[index] += rest;
    const last = ids.length - 1;
    const known = ids.indexOf(guess.token);
    const at = known >= 0 && known < last ? known : last;
    ids[at] = guess.token;
    scores[at] = Math.log(p);
  }
}

/** Add the noise, and turn the sums into log-probabilities. */
function perturb(scores: Float64Array, ids: readonly number[], noise: Noise): void {
  let most = Number.NEGATIVE_INFINITY;
  for (let index = 0; index < scores.length; index++) {
    scores[index] += noise.gumbel(ids[index]);
    most = Math.max(most, scores[index]);
  }
  for (let index = 0; index < scores.length; index++) scores[index] -= most;
  normalise(scores);
}
