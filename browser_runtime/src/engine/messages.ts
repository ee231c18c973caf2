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
  /** 0: chosen by the machine, where the page is cross-origin isolated; else one. */
  threads: number;
  /** Folder of ONNX Runtime's WebAssembly. */
  wasmUrl: string;
  /** null: measure, where the machine has WebGPU, and take the faster one. */
  provider: Provider | null;
}

/** A tree as it travels. */
export type PlainDraft = Omit<Draft, "tree"> & { tokens: readonly number[]; parents: readonly number[] };

/** A text, and how tokens behind it are drawn. */
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

/** The worker's answer to the job of this id. */
export type Reply = { id: number; result: unknown } | { id: number; error: string };

/** Measured at the start: the processor, and seconds of an eight-wide step after 128 tokens. */
export interface Started {
  provider: Provider;
  threads: number;
  stepSeconds: number;
}
