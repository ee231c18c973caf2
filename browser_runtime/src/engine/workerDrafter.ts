/** A drafter in a worker of its own. */

import type { DrafterThread, Timed } from "../answer/drafterThread.js";
import type { Bundle } from "../bundle/bundle.js";
import type { Draft, TreeShape } from "../drafting/drafter.js";
import { type Constraint, plainConstraint } from "../protocol/constraint.js";
import type { Sampling } from "../protocol/sampling.js";
import { TokenTree } from "../protocol/tree.js";
import type { Job, PlainDraft, Provider, Reply, Request, Started } from "./messages.js";
import { EngineError } from "./onnx.js";

export interface DrafterOptions {
  /** The worker's script; by default `worker.js` beside this module. */
  worker?: Worker;
  /** Folder of ONNX Runtime's .wasm and .mjs files. */
  wasmUrl: string | URL;
  /** 0: the machine's choice. More than one needs a page that is cross-origin isolated. */
  threads?: number;
  /** null: WebGPU if it is available and measured to be faster, otherwise WebAssembly. */
  provider?: Provider | null;
  /** Draft tokens that followed the same few tokens earlier in this text, or in an earlier one. */
  lookup?: boolean;
}

/** Start a drafter for `bundle`: compile the engine, expand its tables, measure it. Throws EngineError. */
export async function startDrafter(bundle: Bundle, options: DrafterOptions): Promise<WorkerDrafter> {
  const { manifest } = bundle;
  const worker = options.worker ?? new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  const { engineFile, engineData } = manifest;
  const model = engineFile === null ? null : (await bundle.readFile(engineFile)).slice();
  const data = engineData === null ? null : (await bundle.readFile(engineData)).slice();
  const setup = {
    files: model && { model, data, dataName: engineData },
    draftIds: bundle.draftIds,
    nullRow: bundle.nullRow,
    confidenceTemperature: manifest.confidenceTemperature,
    saKvHeads: manifest.saKvHeads,
    caKvHeads: manifest.caKvHeads,
    headDim: manifest.headDim,
    maxContext: manifest.maxContext,
    lookup: options.lookup ?? true,
    threads: options.threads ?? 0,
    wasmUrl: new URL(options.wasmUrl, globalThis.location?.href).href,
    provider: options.provider ?? null,
  };
  const buffers = [model, data].flatMap(file => (file ? [file.buffer] : []));
  return WorkerDrafter.start(worker, { type: "start", setup }, buffers);
}

export class WorkerDrafter implements DrafterThread {
  private readonly jobs = new Map<number, { resolve: (result: never) => void; reject: (error: Error) => void }>();
  private jobCount = 0;

  private constructor(private readonly worker: Worker) {
    worker.onmessage = ({ data }: MessageEvent<Reply>) => {
      const job = this.jobs.get(data.id);
      this.jobs.delete(data.id);
      if ("error" in data) job?.reject(new EngineError(data.error));
      else job?.resolve(data.result as never);
    };
    worker.onerror = event => this.fail(event.message || "the drafter's worker does not load");
  }

  /** The measurements at the start. */
  started!: Started;

  static async start(worker: Worker, job: Job, transfer: Transferable[]): Promise<WorkerDrafter> {
    const drafter = new WorkerDrafter(worker);
    try {
      drafter.started = await drafter.ask<Started>(job, transfer);
    } catch (error) {
      worker.terminate();
      throw error;
    }
    return drafter;
  }

  want(key: string, silent: boolean): void {
    this.tell({ type: "want", key, silent });
  }

  async draft(
    prefix: readonly number[],
    sampling: Sampling,
    shape: TreeShape,
    key: string | null,
    constraint: Constraint | null = null,
  ): Promise<Timed<Draft>> {
    const drawing = { prefix, sampling: { ...sampling }, constraint: plainConstraint(constraint) };
    const job: Job = { type: "draft", ...drawing, shape, key };
    const { result, seconds } = await this.ask<Timed<PlainDraft>>(job);
    const { tokens, parents, ...others } = result;
    return { result: { ...others, tree: new TokenTree(tokens, parents) }, seconds };
  }

  nextToken(
    prefix: readonly number[],
    sampling: Sampling,
    constraint: Constraint | null = null,
  ): Promise<Timed<{ token: number; probability: number }>> {
    const drawing = { prefix, sampling: { ...sampling }, constraint: plainConstraint(constraint) };
    return this.ask({ type: "nextToken", ...drawing });
  }

  draftAhead(shape: TreeShape, key: string): Promise<Timed<number>> {
    return this.ask({ type: "draftAhead", shape, key });
  }

  addRows(positions: readonly number[], rows: Float32Array): void {
    this.tell({ type: "addRows", positions, rows });
  }

  keepRows(length: number): void {
    this.tell({ type: "keepRows", length });
  }

  remember(text: readonly number[]): void {
    this.tell({ type: "remember", text });
  }

  forget(): void {
    this.tell({ type: "forget" });
  }

  async close(): Promise<void> {
    await this.ask({ type: "close" }).catch(() => {});
    this.worker.terminate();
    this.fail("the drafter is closed");
  }

  private fail(why: string): void {
    for (const { reject } of this.jobs.values()) reject(new EngineError(why));
    this.jobs.clear();
  }

  private tell(request: Request): void {
    this.worker.postMessage(request);
  }

  private ask<T>(job: Job, transfer: Transferable[] = []): Promise<T> {
    const id = ++this.jobCount;
    return new Promise((resolve, reject) => {
      this.jobs.set(id, { resolve, reject });
      this.worker.postMessage({ ...job, id }, transfer);
    });
  }
}
