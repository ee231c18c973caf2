/** Messages between a page and the understudy's worker. */

import type { UnderstudyEntry } from "../bundle/manifest.js";
import type { PlainConstraint } from "../protocol/constraint.js";
import type { SamplingOptions } from "../protocol/sampling.js";

export interface UnderstudySetup {
  /** Name of the `UnderstudyStore`, and the entry to read from it. */
  store: string;
  entry: UnderstudyEntry;
  maxContext: number;
  /** The target's. */
  vocabSize: number;
  /** Texts of the tokens that may be part of a code fence. */
  marks: readonly (readonly [number, string])[];
  /** 0: the machine's choice. One if the page is not cross-origin isolated. */
  threads: number;
  /** Folder of ONNX Runtime's WebAssembly. */
  wasmUrl: string;
}

/** An `UnderstudyText` in the form of messages. */
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

/** cancel: the job with this id is no longer wanted; its result is null. */
export type UnderstudyRequest = (UnderstudyJob & { id: number }) | { type: "cancel"; of: number };
