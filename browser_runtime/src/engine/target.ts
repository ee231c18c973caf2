/** Runs a target's graph (`outrider_core/targets/graph.py`) for one text with ONNX Runtime's WebAssembly. */

import type { InferenceSession, Tensor, TypedTensor } from "onnxruntime-common";
import type { TargetFiles, TargetShape } from "../bundle/understudyStore.js";
import { feedOf, POOL_BLOCK } from "../targets/feeds.js";
import type { TargetModel } from "../targets/understudy.js";
import { EngineError, type OnnxRuntime, oneLine } from "./onnx.js";

/**
 * Keys and values of the text are in arrays [blocks, kvHeads, POOL_BLOCK, headDim] of this process, which are inputs and
 * outputs of each step; they grow with the text.
 */
export class OnnxTarget implements TargetModel {
  private readonly pools: string[];
  private pool = new Map<string, Float32Array>();

  private constructor(
    private readonly ort: OnnxRuntime,
    private readonly session: InferenceSession,
    private readonly shape: TargetShape,
    readonly maxContext: number,
  ) {
    this.pools = Array.from({ length: shape.layers }, (_, layer) => [`keys_${layer}`, `values_${layer}`]).flat();
  }

  /** maxContext: most tokens of a text. Throws EngineError. */
  static async load(ort: OnnxRuntime, files: TargetFiles, maxContext: number): Promise<OnnxTarget> {
    try {
      const session = await ort.InferenceSession.create(files.model, {
        executionProviders: ["wasm"],
        externalData: [{ path: files.dataName, data: files.data }],
        logSeverityLevel: 3,
      });
      return new OnnxTarget(ort, session, files.shape, maxContext);
    } catch (error) {
      throw new EngineError(`the understudy does not load: ${oneLine(error)}`);
    }
  }

  async step(past: number, tokens: readonly number[], wanted: number): Promise<Float32Array[]> {
    if (past < 0 || !tokens.length || past + tokens.length > this.maxContext) {
      throw new RangeError(`${tokens.length} tokens behind ${past} do not fit a context of ${this.maxContext}`);
    }
    const { blocks, inputs } = feedOf(this.shape, past, tokens, wanted);
    const { kvHeads, headDim, vocabSize } = this.shape;
    const feeds: Record<string, Tensor> = {};
    for (const [name, { type, data, dims }] of Object.entries(inputs)) {
      feeds[name] = new this.ort.Tensor(type as "float32", data as Float32Array, dims);
    }
    const dims = [blocks, kvHeads, POOL_BLOCK, headDim];
    for (const name of this.pools) feeds[name] = new this.ort.Tensor("float32", this.room(name, blocks), dims);
    let given: InferenceSession.ReturnType;
    try {
      given = await this.session.run(feeds);
    } catch (error) {
      throw new EngineError(`a step of the understudy failed: ${oneLine(error)}`);
    }
    const values = (name: string) => (given[name] as TypedTensor<"float32">).data as Float32Array;
    for (const name of this.pools) this.pool.set(name, values(`new_${name}`));
    const logits = values("logits");
    return Array.from({ length: wanted }, (_, row) => logits.subarray(row * vocabSize, (row + 1) * vocabSize));
  }

  async close(): Promise<void> {
    this.pool.clear();
    await this.session.release();
  }

  /** Return the first `blocks` of this pool, which grows if needed. */
  private room(name: string, blocks: number): Float32Array {
    const size = blocks * this.shape.kvHeads * POOL_BLOCK * this.shape.headDim;
    const held = this.pool.get(name);
    if (held && held.length >= size) return held.subarray(0, size);
    const longer = new Float32Array(size);
    if (held) longer.set(held);
    return longer;
  }
}
