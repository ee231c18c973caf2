/** The drafter's jobs, in the order of their requests, and drafting ahead between them. */

import { type Draft, type Drafter, NO_DRAFT, type TreeShape } from "../drafting/drafter.js";
import type { Constraint } from "../protocol/constraint.js";
import type { Sampling } from "../protocol/sampling.js";
import { breathe } from "./breathe.js";

/** A result and the seconds that the drafter worked for it. */
export interface Timed<T> {
  result: T;
  seconds: number;
}

/**
 * Owns the drafter; jobs never overlap. A job carries the key of its purpose, and ends early, within one engine step, once
 * another key is wanted. Promises reject with the engine's errors.
 */
export interface DrafterThread {
  /** Seconds of a step as a tree takes it; 0: it was not measured. */
  readonly started?: { readonly stepSeconds: number };
  /** Make `key` the wanted one from now on. silent: the target has fallen silent. */
  want(key: string, silent: boolean): void;
  /** key null: whatever key is wanted; empty once the target falls silent. constraint: its biases and penalties apply. */
  draft(
    prefix: readonly number[],
    sampling: Sampling,
    shape: TreeShape,
    key: string | null,
    constraint?: Constraint | null,
  ): Promise<Timed<Draft>>;
  nextToken(
    prefix: readonly number[],
    sampling: Sampling,
    constraint?: Constraint | null,
  ): Promise<Timed<{ token: number; probability: number }>>;
  /** Grow the last tree while `key` is wanted and no job waits; return the nodes expanded. */
  draftAhead(shape: TreeShape, key: string): Promise<Timed<number>>;
  addRows(positions: readonly number[], rows: Float32Array): void;
  keepRows(length: number): void;
  remember(text: readonly number[]): void;
  forget(): void;
  /** Drop waiting jobs, and free the engine. */
  close(): Promise<void>;
}

/** A DrafterThread in the calling thread: inside a worker, or in a program without one. */
export class LocalDrafter implements DrafterThread {
  private queue: Promise<unknown> = Promise.resolve();
  private asked = 0;
  private wanted = "";
  private silent = false;
  private closed = false;

  /** free: frees the engine. */
  constructor(
    private readonly drafter: Drafter,
    private readonly free: () => Promise<void>,
  ) {}

  want(key: string, silent: boolean): void {
    this.wanted = key;
    this.silent = silent;
  }

  draft(
    prefix: readonly number[],
    sampling: Sampling,
    shape: TreeShape,
    key: string | null,
    constraint: Constraint | null = null,
  ) {
    let silent = false; // whether the target has fallen silent meanwhile
    const cancelled = async () => {
      await breathe();
      silent ||= key === null && this.silent;
      return this.closed || silent || (key !== null && this.wanted !== key);
    };
    return this.submit(async () => {
      const draft = await this.drafter.draft(prefix, sampling, shape, cancelled, constraint);
      return silent ? NO_DRAFT : draft;
    });
  }

  nextToken(prefix: readonly number[], sampling: Sampling, constraint: Constraint | null = null) {
    return this.submit(() => this.drafter.nextToken(prefix, sampling, constraint));
  }

  draftAhead(shape: TreeShape, key: string) {
    const asked = ++this.asked;
    const cancelled = async () => {
      await breathe();
      return this.closed || this.asked !== asked || this.wanted !== key;
    };
    return this.run(() => this.drafter.draftAhead(shape, cancelled));
  }

  addRows(positions: readonly number[], rows: Float32Array): void {
    void this.submit(async () => this.drafter.addRows(positions, rows));
  }

  keepRows(length: number): void {
    void this.submit(async () => this.drafter.keepRows(length));
  }

  remember(text: readonly number[]): void {
    void this.submit(async () => this.drafter.remember(text));
  }

  forget(): void {
    void this.submit(async () => this.drafter.forget());
  }

  async close(): Promise<void> {
    this.closed = true;
    await this.queue;
    await this.free();
  }

  private submit<T>(job: () => Promise<T>): Promise<Timed<T>> {
    this.asked++;
    return this.run(job);
  }

  private run<T>(job: () => Promise<T>): Promise<Timed<T>> {
    const done = this.queue.then(async () => {
      if (this.closed) throw new Error("the drafter is closed");
      const began = performance.now();
      return { result: await job(), seconds: (performance.now() - began) / 1000 };
    });
    this.queue = done.catch(() => {});
    return done;
  }
}
