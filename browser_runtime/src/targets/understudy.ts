/**
 * A complete small model with the target's tokenizer, which writes when the target is silent.
 *
 * It draws as the target does, with the same keyed noise, so that a good understudy writes much of what the target would
 * have written. Small models tend to repeat themselves. Tokens that would continue a repetition of the answer are penalised
 * by DRY ("Don't Repeat Yourself", the sampler of that name), but never inside code.
 */

import type { Constraint } from "../protocol/constraint.js";
import { commonPrefix } from "../protocol/prefix.js";
import { draw, logProbs, Sampling } from "../protocol/sampling.js";

/** Tokens read in one step, so that reading can be cancelled in between. */
const READ_CHUNK = 64;
/**
 * DRY: a token that would continue a repetition of `n` tokens loses MULTIPLIER * BASE ** (n - ALLOWED) of its logit, from n
 * = ALLOWED on, and at most MOST. Ordinary text repeats fewer tokens than that.
 */
const DRY_MULTIPLIER = 0.8;
const DRY_BASE = 1.75;
const DRY_ALLOWED = 10;
const DRY_MOST = 100;
/** Opens and closes code. */
const FENCE = "```";

/** A complete model in memory that keeps what it has read, position by position. */
export interface TargetModel {
  /** Most tokens of a text. */
  readonly maxContext: number;
  /**
   * Reads `tokens`, at least one, after the first `past` positions; what was held from there on is overwritten.
   *
   * Returns the logits [vocab] after each of the last `wanted` of them, at least one.
   */
  step(past: number, tokens: readonly number[], wanted: number): Promise<Float32Array[]>;
  /** Frees what it holds. */
  close(): Promise<void>;
}

/** Whether the result is no longer wanted. */
export type Cancelled = () => Promise<boolean>;

/**
 * The settings for drawing the tokens of one answer. promptLength: tokens of the text before the answer. constraint: its
 * biases and penalties apply to each draw.
 */
export interface Decoding {
  promptLength: number;
  sampling: Sampling;
  constraint?: Constraint | null;
}

export interface Written {
  token: number;
  probability: number;
}

/** Tokens after a text, and log-probabilities of the path to each. */
export interface Chain {
  tokens: number[];
  scores: number[];
}

/** A draft: the last tokens of `text`, with their `logProbs`. */
interface Drafted {
  text: number[];
  logProbs: number[];
  decoding: Decoding;
}

const never: Cancelled = async () => false;

/** One call at a time. */
export class Understudy {
  private held: number[] = []; // the tokens that the model has read
  private logits: Float32Array | null = null; // after the last of these
  private written: Drafted = { text: [], logProbs: [], decoding: { promptLength: 0, sampling: new Sampling() } };
  /** Tokens so far. */
  drafted = 0;

  /**
   * decode: text of token ids. vocab: of the target; if it is smaller than this model's, the logits of higher ids are left
   * out. barred: ids that it must not write.
   */
  constructor(
    private readonly model: TargetModel,
    private readonly vocab: number,
    private readonly decode: (ids: readonly number[]) => string,
    private readonly barred: readonly number[] = [],
  ) {}

  /** Read `text`, except what is read already. Returns false if it was `cancelled` before the end. */
  async read(text: readonly number[], cancelled: Cancelled = never): Promise<boolean> {
    if (await cancelled()) return false;
    this.keep(text);
    while (!this.logits || this.held.length < text.length) {
      if (await cancelled()) return false;
      const chunk = text.slice(this.held.length, this.held.length + READ_CHUNK);
      [this.logits] = await this.step(this.held.length, chunk, 1);
      this.held.push(...chunk);
    }
    return true;
  }

  /**
   * Return how many of the tokens from `base` on it would have written itself, up to the first difference. It has read all
   * of them then, or as many as agree. null: it was `cancelled`.
   */
  async agreed(
    text: readonly number[],
    base: number,
    decoding: Decoding,
    cancelled: Cancelled = never,
  ): Promise<number | null> {
    if (!(await this.read(text.slice(0, base), cancelled))) return null;
    let agreed = base;
    while (agreed < text.length) {
      if (await cancelled()) return null;
      const chunk = text.slice(agreed, agreed + READ_CHUNK);
      // the token before is run again: its logits judge the first one
      const rows = await this.step(agreed - 1, [text[agreed - 1], ...chunk], 1 + chunk.length);
      let same = 0;
      while (same < chunk.length) {
        const before = text.slice(0, agreed + same);
        if (draw(this.judged(rows[same], before, decoding), decoding.sampling, before.length) !== chunk[same]) break;
        same++;
      }
      agreed += same;
      this.held = text.slice(0, agreed);
      this.logits = rows[same];
      if (same < chunk.length) break;
    }
    return agreed - base;
  }

  /** Return its next token after `text`, and that token's probability; null: it was `cancelled`. */
  async nextToken(text: readonly number[], decoding: Decoding, cancelled: Cancelled = never): Promise<Written | null> {
    if (!(await this.read(text, cancelled))) return null;
    const judged = this.judged(this.logits!, text, decoding);
    const token = draw(judged, decoding.sampling, text.length);
    const logits = decoding.constraint ? judged : this.logits!;
    return { token, probability: Math.exp(logProbs(logits, new Sampling())[token]) };
  }

  /**
   * Return at most `count` tokens that the target may draw after `text`. Drafts are not penalised for repetition. Fewer come
   * once they are `cancelled`. The draft of a text that this one continues is reused.
   */
  async draft(
    text: readonly number[],
    count: number,
    decoding: Decoding,
    cancelled: Cancelled = never,
  ): Promise<Chain> {
    const { written } = this;
    const size = text.length;
    const surplus = size + written.logProbs.length - written.text.length; // drafted tokens that `text` contains
    const [{ sampling, constraint = null }, before] = [decoding, written.decoding];
    const alike = sampling.equals(before.sampling);
    const bound = constraint ? constraint.addsAs(before.constraint ?? null) : !before.constraint;
    const behind = surplus >= 0 && commonPrefix(text, written.text) === size;
    if (alike && bound && behind) written.logProbs.splice(0, surplus);
    else this.written = { text: [...text], logProbs: [], decoding };
    await this.goOn(count, cancelled);
    let score = 0;
    const scores = this.written.logProbs.slice(0, count).map(value => (score += value));
    return { tokens: this.written.text.slice(size, size + count), scores };
  }

  /** Draft `count` tokens more, until they are `cancelled`. */
  async draftAhead(count: number, cancelled: Cancelled): Promise<void> {
    if (this.written.text.length) await this.goOn(this.written.logProbs.length + count, cancelled);
  }

  close(): Promise<void> {
    return this.model.close();
  }

  /** Extend the draft to `count` tokens. */
  private async goOn(count: number, cancelled: Cancelled): Promise<void> {
    const { text, logProbs: known, decoding } = this.written;
    while (known.length < count && text.length < this.model.maxContext && (await this.read(text, cancelled))) {
      const judged = adjusted(this.logits!, text, decoding.constraint);
      const token = draw(judged, decoding.sampling, text.length);
      known.push(logProbs(judged, new Sampling())[token]);
      text.push(token);
      this.drafted++;
    }
  }

  private async step(past: number, tokens: readonly number[], wanted: number): Promise<Float32Array[]> {
    try {
      const rows = (await this.model.step(past, tokens, wanted)).map(row => row.subarray(0, this.vocab));
      for (const row of rows)
        for (const token of this.barred) if (token < row.length) row[token] = Number.NEGATIVE_INFINITY;
      return rows;
    } catch (error) {
      this.held = []; // its contents are unknown now
      this.logits = null;
      throw error;
    }
  }

  /** Forget what was read beyond the common prefix with `text`, whose last token is read again if needed. */
  private keep(text: readonly number[]): void {
    const same = commonPrefix(text, this.held);
    if (same === this.held.length && this.logits) return;
    this.held.length = Math.min(same, text.length - 1);
    this.logits = null;
  }

  /** Return the logits from which the token after `text` is drawn. */
  private judged(
    logits: Float32Array,
    text: readonly number[],
    { promptLength, constraint }: Decoding,
  ): Float32Array | Float64Array {
    const answer = text.slice(promptLength);
    const losses = repetitions(answer);
    const inCode = losses.size > 0 && this.decode(answer).split(FENCE).length % 2 === 0;
    if (!losses.size || inCode) return adjusted(logits, text, constraint);
    const lowered = logits.slice();
    for (const [token, length] of losses) {
      const loss = DRY_MULTIPLIER * DRY_BASE ** Math.min(length - DRY_ALLOWED, 20);
      lowered[token] -= Math.fround(Math.min(DRY_MOST, loss));
    }
    return adjusted(lowered, text, constraint);
  }
}

/** Return the logits from which the token after `text` is drawn, with the biases and penalties of `constraint`. */
function adjusted(
  logits: Float32Array,
  text: readonly number[],
  constraint: Constraint | null | undefined,
): Float32Array | Float64Array {
  const amounts = constraint?.amounts(text);
  if (!amounts?.size) return logits;
  const sums = Float64Array.from(logits);
  for (const [token, amount] of amounts) sums[token] += amount;
  return sums;
}

/** Return tokens that would continue a repetition of at least DRY_ALLOWED tokens, each with the longest one's length. */
export function repetitions(answer: readonly number[]): Map<number, number> {
  const found = new Map<number, number>();
  for (let end = DRY_ALLOWED; end < answer.length; end++) {
    let length = 0;
    while (length < end && answer[end - length - 1] === answer[answer.length - length - 1]) length++;
    if (length >= DRY_ALLOWED) found.set(answer[end], Math.max(length, found.get(answer[end]) ?? 0));
  }
  return found;
}
