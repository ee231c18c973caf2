/** The understudy's jobs, in the order in which they were asked for. */

import type { Constraint } from "../protocol/constraint.js";
import type { Sampling } from "../protocol/sampling.js";
import type { Chain, Understudy, Written } from "../targets/understudy.js";
import { breathe } from "./breathe.js";

/** A text, where the answer in it begins, and how tokens are drawn: of the constraint, its biases and penalties count. */
export interface UnderstudyText {
  text: readonly number[];
  begin: number;
  sampling: Sampling;
  constraint?: Constraint | null;
}

/**
 * A chain and the seconds of its steps: the first token ends the reading, and what was known takes none. steps: tokens
 * that were drafted meanwhile.
 */
export interface TimedChain extends Chain {
  steps: number;
  seconds: number;
}

/**
 * Owns the understudy; jobs never overlap. A job ends early, within one step of the model, once it is not wanted any more:
 * with null. Promises reject where it cannot be used.
 */
export interface UnderstudyThread {
  /** Whether it is here, so that an answer may count on it. */
  readonly present: boolean;
  /** Read the text; how many of its tokens from `base` on the understudy would have written itself. */
  agreed(of: UnderstudyText, base: number, wanted: () => boolean): Promise<number | null>;
  nextToken(of: UnderstudyText, wanted: () => boolean): Promise<Written | null>;
  /** A chain of at most `count` tokens behind the text; as far as it came where it is not wanted any more. */
  draft(of: UnderstudyText, count: number, wanted: () => boolean): Promise<TimedChain | null>;
  /** Write on behind the last chain, `count` tokens more, while it is wanted and no other job waits. */
  draftAhead(count: number, wanted: () => boolean): Promise<void>;
  /** Something has happened: jobs may not be wanted any more. */
  review(): void;
  /** Give its memory back; what is asked of it next brings it in again. */
  unload(): void;
  close(): Promise<void>;
}

/** An UnderstudyThread where it is called, in a program that has no workers. */
export class LocalUnderstudy implements UnderstudyThread {
  readonly present = true;
  private queue: Promise<unknown> = Promise.resolve();
  private understudy: Promise<Understudy> | null = null;
  /** Jobs that have not begun. */
  private waiting = 0;

  /** open: brings it into memory. */
  constructor(private readonly open: () => Promise<Understudy>) {}

  agreed(of: UnderstudyText, base: number, wanted: () => boolean): Promise<number | null> {
    const { text, begin, sampling, constraint } = of;
    return this.run(wanted, it => it.agreed(text, base, begin, sampling, when(wanted), constraint));
  }

  nextToken({ text, begin, sampling, constraint }: UnderstudyText, wanted: () => boolean): Promise<Written | null> {
    return this.run(wanted, it => it.nextToken(text, begin, sampling, when(wanted), constraint));
  }

  draft(
    { text, sampling, constraint }: UnderstudyText,
    count: number,
    wanted: () => boolean,
  ): Promise<TimedChain | null> {
    return this.run(wanted, async it => {
      const draft = (most: number) => it.draft(text, most, sampling, when(wanted), constraint);
      await draft(Math.min(1, count));
      const [began, before] = [performance.now(), it.drafted];
      const chain = await draft(count);
      return { ...chain, steps: it.drafted - before, seconds: (performance.now() - began) / 1000 };
    });
  }

  async draftAhead(count: number, wanted: () => boolean): Promise<void> {
    const still = () => wanted() && !this.waiting && this.understudy !== null;
    await this.run(still, it => it.draftAhead(count, when(still)));
  }

  review(): void {}

  unload(): void {
    this.waiting++;
    const unload = async () => {
      this.waiting--;
      const held = this.understudy;
      this.understudy = null;
      await (await held)?.close();
    };
    this.queue = this.queue.then(unload).catch(() => {});
  }

  async close(): Promise<void> {
    this.unload();
    await this.queue;
  }

  private run<T>(wanted: () => boolean, job: (understudy: Understudy) => Promise<T>): Promise<T | null> {
    this.waiting++;
    const done = this.queue.then(async () => {
      this.waiting--;
      if (!wanted()) return null;
      this.understudy ??= this.open();
      try {
        return await job(await this.understudy);
      } catch (error) {
        this.understudy = null;
        throw error;
      }
    });
    this.queue = done.catch(() => {});
    return done;
  }
}

/** Asks again once messages have come in. */
function when(wanted: () => boolean): () => Promise<boolean> {
  return async () => {
    await breathe();
    return wanted();
  };
}
