/** Runs the device half with ONNX Runtime's WebAssembly or WebGPU build. */

import type { InferenceSession, Tensor, TypedTensor } from "onnxruntime-common";
import type { DraftStep, Engine, StepResult } from "../drafting/engine.js";
import { EXPANDED, expand } from "./expand.js";

/** The part of `onnxruntime-web` that this module needs, in any build. */
export interface OnnxRuntime {
  InferenceSession: { create(model: Uint8Array, options: InferenceSession.SessionOptions): Promise<InferenceSession> };
  Tensor: typeof Tensor;
}

/** model: drafter.onnx; data: the file beside it, as the model names it, or null. */
export interface EngineFiles {
  model: Uint8Array<ArrayBuffer>;
  data: Uint8Array<ArrayBuffer> | null;
  dataName: string | null;
}

/** The engine cannot be started or a step failed. The message is one line. */
export class EngineError extends Error {}

const OUTPUTS = ["logits", "new_keys", "new_values"];

export class OnnxEngine implements Engine {
  private constructor(
    private readonly ort: OnnxRuntime,
    private readonly session: InferenceSession,
    private readonly saHeads: number,
    private readonly caHeads: number,
    private readonly headDim: number,
  ) {}

  /** unpacked: unpack tables once, which is faster in WebAssembly. Throws EngineError. */
  static async load(
    ort: OnnxRuntime,
    files: EngineFiles,
    shape: { saKvHeads: number; caKvHeads: number; headDim: number },
    provider: "wasm" | "webgpu" = "wasm",
    unpacked = provider === "wasm",
  ): Promise<OnnxEngine> {
    const externalData = files.data && files.dataName ? [{ path: files.dataName, data: files.data }] : [];
    try {
      const expanded = unpacked ? expand(files.model, files.data) : null;
      if (expanded) externalData.push({ path: EXPANDED, data: expanded.weights });
      const session = await ort.InferenceSession.create(expanded?.model ?? files.model, {
        executionProviders: [provider],
        externalData,
        logSeverityLevel: 3,
      });
      return new OnnxEngine(ort, session, shape.saKvHeads, shape.caKvHeads, shape.headDim);
    } catch (error) {
      throw new EngineError(`the drafter does not load: ${oneLine(error)}`);
    }
  }

  async step(step: DraftStep): Promise<StepResult> {
    const { tokens, past, rows, headDim, saHeads, caHeads } = { ...step, ...this.shape };
    const size = tokens.length;
    const ints = (values: readonly number[]) => {
      return new this.ort.Tensor("int64", BigInt64Array.from(values, BigInt), [values.length]);
    };
    const floats = (values: Float32Array, dims: number[]) => new this.ort.Tensor("float32", values, dims);
    try {
      const given = await this.session.run({
        tokens: ints(tokens),
        positions: ints(step.positions),
        wanted: ints(step.wanted),
        sa_mask: floats(step.mask, [size, past + size]),
        sa_keys: floats(step.keys, [past, saHeads, headDim]),
        sa_values: floats(step.values, [past, saHeads, headDim]),
        row_keys: floats(step.rowKeys, [rows, caHeads, headDim]),
        row_values: floats(step.rowValues, [rows, caHeads, headDim]),
      });
      const [logits, keys, values] = OUTPUTS.map(name => (given[name] as TypedTensor<"float32">).data as Float32Array);
      return { logits, keys, values };
    } catch (error) {
      throw new EngineError(`a step of the drafter failed: ${oneLine(error)}`);
    }
  }

  async close(): Promise<void> {
    await this.session.release();
  }

  private get shape() {
    return { saHeads: this.saHeads, caHeads: this.caHeads, headDim: this.headDim };
  }
}

export function oneLine(error: unknown): string {
  return (error instanceof Error ? error.message : String(error)).replace(/\s+/g, " ").slice(0, 300);
}
