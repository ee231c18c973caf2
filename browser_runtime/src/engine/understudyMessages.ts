/** Messages between a page and the understudy's worker. */

import type { UnderstudyEntry } from "../bundle/manifest.js";
import type { PlainConstraint } from "../protocol/constraint.js";
import type { SamplingOptions } from "../protocol/sampling.js";

export interface UnderstudySetup {
  /** Name of the `UnderstudyStore`, and what of it is read. */
  store: string;
  entry: UnderstudyEntry;
  maxContext: number;
  /** Of the target. */
  vocabSize: number;
  /** Texts of the tokens in which a fence of code may stand. */
  marks: readonly (readonly [number, string])[];
  /** 0: chosen by the machine, where the page is cross-origin isolated; else one. */
  threads: number;
  /** Folder of ONNX Runtime's WebAssembly. */
  wasmUrl: string;
}

/** An `UnderstudyText`. */
interface Text {
  text: readonly number[];
  promptLength: number;
  sampling: SamplingOptions;
  constraint: PlainConstraint | null;
}

export type UnderstudyJob =
  | { type: "start"; setup: UnderstudySetup }
  | (Text & { type: "agreed"; base: number })
  | (Text & { type: "nextToken" })
  | (Text & { type: "draft"; count: number })
  | { type: "draftAhead"; count: number };

/** cancel: the job of this id is no longer wanted; its result is null. */
export type UnderstudyRequest = (UnderstudyJob & { id: number }) | { type: "cancel"; of: number };
