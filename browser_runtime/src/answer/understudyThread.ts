/** The understudy's jobs, in the order in which they were asked for. */

import type { Cancelled, Chain, Decoding, Understudy, Written } from "../targets/understudy.js";
import { breathe } from "./breathe.js";

/** A text and how tokens are drawn behind it. */
export interface UnderstudyText extends Decoding {
  text: readonly number[];
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
 * Owns the understudy; jobs never overlap. A job ends early, within one step of the model, once it is `cancelled`: with null.
 * Promises reject where it cannot be used.
 */
export interface UnderstudyThread {
  /** Whether the model is available, so that an answer may rely on it. */
  readonly present: boolean;
  /** Read the text; how many of its tokens from `base` on the understudy would have written itself. */
  agreed(of: UnderstudyText, base: number, cancelled: () => boolean): Promise<number | null>;
  nextToken(of: UnderstudyText, cancelled: () => boolean): Promise<Written | null>;
  /** A chain of at most `count` tokens behind the text; as far as it came once it is cancelled. */
  draft(of: UnderstudyText, count: number, cancelled: () => boolean): Promise<TimedChain | null>;
  /** Write on behind the last chain, `count` tokens more, until that is cancelled or another job waits. */
  draftAhead(count: number, cancelled: () => boolean): Promise<void>;
  /** Something has happened: jobs may be cancelled. */
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

  agreed(of: UnderstudyText, base: number, cancelled: () => boolean): Promise<number | null> {
    return this.run(cancelled, it => it.agreed(of.text, base, of, later(cancelled)));
  }

  nextToken(of: UnderstudyText, cancelled: () => boolean): Promise<Written | null> {
    return this.run(cancelled, it => it.nextToken(of.text, of, later(cancelled)));
  }

  draft(of: UnderstudyText, count: number, cancelled: () => boolean): Promise<TimedChain | null> {
    return this.run(cancelled, async it => {
      const draft = (limit: number) => it.draft(of.text, limit, of, later(cancelled));
      await draft(Math.min(1, count));
      const [began, before] = [performance.now(), it.drafted];
      const chain = await draft(count);
      return { ...chain, steps: it.drafted - before, seconds: (performance.now() - began) / 1000 };
    });
  }

  async draftAhead(count: number, cancelled: () => boolean): Promise<void> {
    const over = () => cancelled() || this.waiting > 0 || this.understudy === null;
    await this.run(over, it => it.draftAhead(count, later(over)));
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

  private run<T>(cancelled: () => boolean, job: (understudy: Understudy) => Promise<T>): Promise<T | null> {
    this.waiting++;
    const done = this.queue.then(async () => {
      this.waiting--;
      if (cancelled()) return null;
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

/** Asks once messages have come in. */
function later(cancelled: () => boolean): Cancelled {
  return async () => {
    await breathe();
    return cancelled();
  };
}
