/** An understudy in a worker of its own, which exists while the model is in memory. */

import type { TimedChain, UnderstudyText, UnderstudyThread } from "../answer/understudyThread.js";
import type { Bundle } from "../bundle/bundle.js";
import { BundleError } from "../bundle/manifest.js";
import { UnderstudyStore } from "../bundle/understudyStore.js";
import { plainConstraint } from "../protocol/constraint.js";
import type { Written } from "../targets/understudy.js";
import type { Reply } from "./messages.js";
import { EngineError } from "./onnx.js";
import type { UnderstudyJob, UnderstudySetup } from "./understudyMessages.js";

export interface UnderstudyOptions {
  /** Makes the worker; by default of `understudyWorker.js` beside this module. */
  worker?: () => Worker;
  /** Folder of ONNX Runtime's .wasm and .mjs files. */
  wasmUrl: string | URL;
  /** 0: the machine's choice. More than one needs a page that is cross-origin isolated. */
  threads?: number;
  /** The store of its files. */
  store?: UnderstudyStore;
}

interface Pending {
  cancelled: () => boolean;
  /** Whether the worker knows that it is cancelled. */
  told: boolean;
  resolve: (result: never) => void;
  reject: (error: Error) => void;
}

/**
 * The understudy of `bundle`, for `EdgeRuntime`. It need not be stored in the browser yet: `UnderstudyStore.fetch` stores
 * it, and `look` finds it. Nothing is loaded before it is used. Throws BundleError if the bundle has none.
 */
export async function openUnderstudy(bundle: Bundle, options: UnderstudyOptions): Promise<WorkerUnderstudy> {
  const { understudy: entry, vocabSize, maxContext } = bundle.manifest;
  if (entry?.format !== "onnx") throw new BundleError("this bundle carries no understudy that runs in a browser");
  const store = options.store ?? new UnderstudyStore();
  const setup: UnderstudySetup = {
    store: store.name,
    entry,
    maxContext,
    vocabSize,
    marks: [...bundle.fenceMarks],
    threads: options.threads ?? 0,
    wasmUrl: new URL(options.wasmUrl, globalThis.location?.href).href,
  };
  const make =
    options.worker ?? (() => new Worker(new URL("./understudyWorker.js", import.meta.url), { type: "module" }));
  const understudy = new WorkerUnderstudy(make, setup, store);
  await understudy.look();
  return understudy;
}

export class WorkerUnderstudy implements UnderstudyThread {
  present = false;
  private worker: Worker | null = null;
  private readonly jobs = new Map<number, Pending>();
  private jobCount = 0;

  constructor(
    private readonly make: () => Worker,
    private readonly setup: UnderstudySetup,
    private readonly store: UnderstudyStore,
  ) {}

  /** Whether it is in memory or being loaded. */
  get loaded(): boolean {
    return this.worker !== null;
  }

  /** Check whether it is stored in this browser now, and so `present`. */
  async look(): Promise<boolean> {
    this.present = await this.store.has(this.setup.entry);
    if (!this.present) this.unload();
    return this.present;
  }

  agreed(of: UnderstudyText, base: number, cancelled: () => boolean): Promise<number | null> {
    return this.ask({ type: "agreed", ...plain(of), base }, cancelled);
  }

  nextToken(of: UnderstudyText, cancelled: () => boolean): Promise<Written | null> {
    return this.ask({ type: "nextToken", ...plain(of) }, cancelled);
  }

  draft(of: UnderstudyText, count: number, cancelled: () => boolean): Promise<TimedChain | null> {
    return this.ask({ type: "draft", ...plain(of), count }, cancelled);
  }

  async draftAhead(count: number, cancelled: () => boolean): Promise<void> {
    if (this.worker) await this.tell(this.worker, { type: "draftAhead", count }, cancelled);
  }

  review(): void {
    for (const [of, job] of this.jobs) {
      if (job.told || !job.cancelled()) continue;
      job.told = true;
      this.worker?.postMessage({ type: "cancel", of });
    }
  }

  unload(): void {
    this.worker?.terminate();
    this.worker = null;
    for (const { resolve } of this.jobs.values()) resolve(null as never); // no longer awaited
    this.jobs.clear();
  }

  async close(): Promise<void> {
    this.unload();
    this.present = false;
  }

  private ask<T>(job: UnderstudyJob, cancelled: () => boolean): Promise<T> {
    this.worker ??= this.start();
    return this.tell(this.worker, job, cancelled);
  }

  private start(): Worker {
    const worker = this.make();
    worker.onmessage = ({ data }: MessageEvent<Reply>) => {
      const job = this.jobs.get(data.id);
      this.jobs.delete(data.id);
      if (!("error" in data)) return job?.resolve(data.result as never);
      job?.reject(new EngineError(data.error));
      this.unload(); // it may have run out of memory
    };
    worker.onerror = event => {
      const error = new EngineError(event.message || "the understudy's worker does not load");
      for (const { reject } of this.jobs.values()) reject(error);
      this.jobs.clear();
      this.unload();
    };
    void this.tell(worker, { type: "start", setup: this.setup }, () => false).catch(() => {});
    return worker;
  }

  private tell<T>(worker: Worker, job: UnderstudyJob, cancelled: () => boolean): Promise<T> {
    const id = ++this.jobCount;
    return new Promise((resolve, reject) => {
      this.jobs.set(id, { cancelled, told: false, resolve, reject });
      worker.postMessage({ ...job, id });
    });
  }
}

function plain({ text, promptLength, sampling, constraint }: UnderstudyText) {
  return { text, promptLength, sampling: { ...sampling }, constraint: plainConstraint(constraint) };
}
