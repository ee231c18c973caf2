/** Engines that run the device half. All drafting state is the caller's; an engine is one pure function. */

/**
 * One draft step of n tokens after `past` cache rows, over m feature rows; all row-major float32.
 *
 * tokens, positions [n]; wanted [w]: of which of the n logits are returned; mask [n, past + n], added to the scores; keys,
 * values [past, saHeads, headDim]; rowKeys, rowValues [m, caHeads, headDim], m at least 1.
 */
export interface DraftStep {
  tokens: readonly number[];
  positions: readonly number[];
  wanted: readonly number[];
  past: number;
  rows: number;
  mask: Float32Array;
  keys: Float32Array;
  values: Float32Array;
  rowKeys: Float32Array;
  rowValues: Float32Array;
}

/** logits [w, draftVocab]; keys, values [n, saHeads, headDim], to append to the cache. */
export interface StepResult {
  logits: Float32Array;
  keys: Float32Array;
  values: Float32Array;
}

export interface Engine {
  step(step: DraftStep): Promise<StepResult>;
  /** Frees what it holds. */
  close(): Promise<void>;
}

/**
 * Replaces the engine of a bundle without a drafter: it proposes nothing, so lookup alone makes the trees. It knows one
 * token, whose logit is -inf.
 */
export class NoDrafter implements Engine {
  async step({ tokens, wanted }: DraftStep): Promise<StepResult> {
    const nothing = new Float32Array(tokens.length);
    return { logits: new Float32Array(wanted.length).fill(Number.NEGATIVE_INFINITY), keys: nothing, values: nothing };
  }

  async close(): Promise<void> {}
}
