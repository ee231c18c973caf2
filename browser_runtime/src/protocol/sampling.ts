/**
 * Draws tokens from the target's logits.
 *
 * Greedy decoding is the case without noise. The draw depends on (logits, parameters, seed, position) and on nothing else:
 * no draft tree, batch or outage can change it.
 */

import { Noise } from "./noise.js";

/** Sampling parameters under the names users know. */
export interface SamplingOptions {
  /** 0 is greedy; at most 100. */
  temperature?: number;
  /** 0 keeps every token. */
  topK?: number;
  /** Above 0, at most 1. */
  topP?: number;
  /** 0 to 1, relative to the most likely token. */
  minP?: number;
  /** 63 bits. */
  seed?: number | bigint;
}

const MAX_SEED = 2n ** 63n - 1n;

/** Checked parameters. Throws RangeError that names the wrong one. */
export class Sampling {
  readonly temperature: number;
  readonly topK: number;
  readonly topP: number;
  readonly minP: number;
  readonly seed: bigint;

  constructor(options: SamplingOptions = {}) {
    const { temperature = 0, topK = 0, topP = 1, minP = 0, seed = 0 } = options;
    expect(temperature >= 0 && temperature <= 100, "temperature must be at least 0 and at most 100", temperature);
    expect(Number.isInteger(topK) && topK >= 0 && topK < 2 ** 32, "topK must be a whole number, 0 or more", topK);
    expect(topP > 0 && topP <= 1, "topP must be above 0 and at most 1", topP);
    expect(minP >= 0 && minP <= 1, "minP must be at least 0 and at most 1", minP);
    const whole = typeof seed === "bigint" || Number.isSafeInteger(seed);
    expect(whole && seed >= 0 && BigInt(seed) <= MAX_SEED, "seed must be a whole number below 2^63", seed);
    this.temperature = temperature;
    this.topK = topK;
    this.topP = topP;
    this.minP = minP;
    this.seed = BigInt(seed);
  }

  get greedy(): boolean {
    return this.temperature === 0;
  }

  equals(other: Sampling): boolean {
    return (["temperature", "topK", "topP", "minP", "seed"] as const).every(name => this[name] === other[name]);
  }
}

function expect(held: boolean, wanted: string, value: unknown): void {
  if (!held) throw new RangeError(`${wanted}, not ${value}`);
}

/**
 * Return the distribution tokens are drawn from: log-probabilities [vocab], -Infinity if cut off.
 *
 * Temperature first, then top-k, then top-p, then min-p, each on what the one before left. For greedy parameters: the
 * log-softmax at temperature 1.
 */
export function logProbs(logits: ArrayLike<number>, sampling: Sampling): Float64Array {
  const x = Float64Array.from(logits);
  const high = x.reduce((most, value) => Math.max(most, value), Number.NEGATIVE_INFINITY);
  const scale = sampling.greedy ? 1 : sampling.temperature;
  for (let i = 0; i < x.length; i++) x[i] = (x[i] - high) / scale;
  normalise(x);
  if (sampling.greedy) return x;
  let cut = Number.NEGATIVE_INFINITY;
  if (sampling.topK > 0 && sampling.topK < x.length) cut = x.slice().sort()[x.length - sampling.topK];
  if (sampling.topP < 1) cut = Math.max(cut, nucleusCut(x, cut, sampling.topP));
  if (sampling.minP > 0)
    cut = Math.max(cut, x.reduce((most, value) => Math.max(most, value)) + Math.log(sampling.minP));
  if (cut === Number.NEGATIVE_INFINITY) return x;
  for (let i = 0; i < x.length; i++) if (x[i] < cut) x[i] = Number.NEGATIVE_INFINITY;
  normalise(x);
  return x;
}

/** Return the log-probability of the last token needed for `topP` of the mass of tokens from `cut` on. */
function nucleusCut(x: Float64Array, cut: number, topP: number): number {
  let total = 0;
  for (const value of x) if (value >= cut) total += Math.exp(value);
  // rarer tokens together have less than half of the mass that top-p cuts off: only the others are sorted
  const least = Math.max(cut, Math.log((total * (1 - topP)) / (2 * x.length)));
  const likely = Array.from(x.keys()).filter(token => x[token] >= least);
  const order = likely.sort((one, other) => x[other] - x[one] || one - other);
  let sum = 0;
  const mass = order.map(token => (sum += Math.exp(x[token])));
  const needed = Math.min(topP * total, sum); // rounding may miss it by a little
  return x[order[mass.findIndex(reached => reached >= needed)]];
}

/** Normalise log-probabilities, so that their probabilities sum to 1. */
export function normalise(x: Float64Array): void {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += Math.exp(x[i]);
  const total = Math.log(sum);
  for (let i = 0; i < x.length; i++) x[i] -= total;
}

/** Draw the token at absolute index `position`: argmax of log p + Gumbel noise; ties go to the lowest id. */
export function draw(logits: ArrayLike<number>, sampling: Sampling, position: number): number {
  if (sampling.greedy) return argmax(logits);
  const noise = new Noise(sampling.seed, position);
  return argmax(logProbs(logits, sampling).map((value, token) => value + noise.gumbel(token)));
}

/** The index of the largest value; of equals the first. */
export function argmax(values: ArrayLike<number>): number {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}
