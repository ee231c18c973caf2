/** Messages between a page and the drafter's worker. */

import type { Draft, TreeShape } from "../drafting/drafter.js";
import type { PlainConstraint } from "../protocol/constraint.js";
import type { SamplingOptions } from "../protocol/sampling.js";
import type { EngineFiles } from "./onnx.js";

/** The processor that computes. */
export type Provider = "wasm" | "webgpu";

/** The worker's first message; the engine's files are transferred, not copied. */
export interface Setup {
  /** null: the bundle has no drafter. */
  files: EngineFiles | null;
  draftIds: Uint32Array;
  nullRow: Float32Array | null;
  confidenceTemperature: number;
  saKvHeads: number;
  caKvHeads: number;
  headDim: number;
  maxContext: number;
  lookup: boolean;
  /** 0: the machine's choice. One if the page is not cross-origin isolated. */
  threads: number;
  /** Folder of ONNX Runtime's WebAssembly. */
  wasmUrl: string;
  /** null: if the machine has WebGPU, measure both and take the faster one. */
  provider: Provider | null;
}

/** A draft in the form of messages. */
export type PlainDraft = Omit<Draft, "tree"> & { tokens: readonly number[]; parents: readonly number[] };

/** A text, and how tokens after it are drawn. */
interface Drawing {
  prefix: readonly number[];
  sampling: SamplingOptions;
  constraint: PlainConstraint | null;
}

export type Job =
  | { type: "start"; setup: Setup }
  | (Drawing & { type: "draft"; shape: TreeShape; key: string | null })
  | (Drawing & { type: "nextToken" })
  | { type: "draftAhead"; shape: TreeShape; key: string }
  | { type: "close" };

export type Request =
  | (Job & { id: number })
  | { type: "want"; key: string; silent: boolean }
  | { type: "addRows"; positions: readonly number[]; rows: Float32Array }
  | { type: "keepRows"; length: number }
  | { type: "remember"; text: readonly number[] }
  | { type: "forget" };

/** The worker's answer to the job with this id. */
export type Reply = { id: number; result: unknown } | { id: number; error: string };

/** Measured at the start: the processor, and seconds of an eight-wide step after 128 tokens. */
export interface Started {
  provider: Provider;
  threads: number;
  stepSeconds: number;
}
