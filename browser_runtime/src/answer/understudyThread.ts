/** The understudy's jobs, in the order of their requests. */

import type { Cancelled, Chain, Decoding, Understudy, Written } from "../targets/understudy.js";
import { breathe } from "./breathe.js";

/** A text, and how tokens after it are drawn. */
export interface UnderstudyText extends Decoding {
  text: readonly number[];
}

/**
 * A chain and the seconds of its steps. Reading ends with the first token; known tokens take no time. steps: tokens drafted
 * for it.
 */
export interface TimedChain extends Chain {
  steps: number;
  seconds: number;
}

/**
 * Owns the understudy; jobs never overlap. A job ends early, within one step of the model, once it is `cancelled`; its
 * result is null. Promises reject if the understudy is unusable.
 */
export interface UnderstudyThread {
  /** Whether the model is available. */
  readonly present: boolean;
  /** Read the text; return how many of its tokens from `base` on the understudy would have written itself. */
  agreed(of: UnderstudyText, base: number, cancelled: () => boolean): Promise<number | null>;
  nextToken(of: UnderstudyText, cancelled: () => boolean): Promise<Written | null>;
  /** Return a chain of at most `count` tokens after the text; once cancelled, the chain so far. */
  draft(of: UnderstudyText, count: number, cancelled: () => boolean): Promise<TimedChain | null>;
  /** Draft `count` tokens more after the last chain, until cancelled or another job waits. */
  draftAhead(count: number, cancelled: () => boolean): Promise<void>;
  /** Check whether jobs are cancelled, as something has happened. */
  review(): void;
  /** Free its memory; its next job loads it again. */
  unload(): void;
  close(): Promise<void>;
}

/** An UnderstudyThread in the calling thread, for a program without workers. */
export class LocalUnderstudy implements UnderstudyThread {
  readonly present = true;
  private queue: Promise<unknown> = Promise.resolve();
  private understudy: Promise<Understudy> | null = null;
  /** Jobs that have not begun. */
  private waiting = 0;

  /** open: loads it into memory. */
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

/** Return a check that first lets messages arrive. */
function later(cancelled: () => boolean): Cancelled {
  return async () => {
    await breathe();
    return cancelled();
  };
}
