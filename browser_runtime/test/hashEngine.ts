/**
 * An engine that every port can implement: logits are a hash of everything that a query sees. The rule is in
 * tests/android/drafter_vectors.py.
 */

import assert from "node:assert/strict";
import type { DraftStep, Engine, StepResult } from "../src/drafting/engine.js";
import { fmix32 } from "../src/protocol/noise.js";

export class HashEngine implements Engine {
  /** script: a text that it tends to predict, as a trained drafter would; not in the vectors. */
  constructor(
    private readonly draftIds: readonly number[],
    private readonly width: number,
    private readonly rowWidth: number,
    public script: readonly number[] = [],
  ) {}

  async step(step: DraftStep): Promise<StepResult> {
    const size = step.tokens.length;
    assert.equal(step.mask.length, size * (step.past + size));
    assert.equal(step.keys.length, step.past * this.width);
    assert.equal(step.values.length, step.past * this.width);
    assert.ok(step.rows >= 1);
    assert.equal(step.rowKeys.length, step.rows * this.rowWidth);
    assert.equal(step.rowValues.length, step.rows * this.rowWidth);
    const keys = new Float32Array(size * this.width);
    for (let row = 0; row < size; row++) {
      keys[row * this.width] = step.tokens[row];
      keys[row * this.width + 1] = step.positions[row];
    }
    const logits = new Float32Array(step.wanted.length * this.draftIds.length);
    for (const [place, query] of step.wanted.entries()) {
      logits.set(this.logits(step, query, keys), place * this.draftIds.length);
    }
    return { logits, keys, values: keys };
  }

  async close(): Promise<void> {}

  private logits(step: DraftStep, query: number, keys: Float32Array): Float32Array {
    const all = step.past + step.tokens.length;
    const seen: number[] = [];
    let h = 1;
    for (let key = 0; key < all; key++) {
      if (step.mask[query * all + key] !== 0) continue;
      const from = key < step.past ? step.keys : keys;
      const at = (key < step.past ? key : key - step.past) * this.width;
      assert.equal(from[at + 1], seen.length, "positions have gaps or repeats");
      h = fmix32(h ^ (Math.imul(0x9e3779b1, from[at]) + seen.length));
      seen.push(from[at]);
    }
    for (let row = 0; row < step.rows; row++) h = fmix32(h ^ Math.trunc(16 * step.rowKeys[row * this.rowWidth]));
    const logits = Float32Array.from(this.draftIds, (_, column) => (fmix32(h ^ fmix32(column)) >>> 16) / 8192);
    const foreseen = this.script.length > seen.length && seen.every((token, index) => token === this.script[index]);
    const column = foreseen ? this.draftIds.indexOf(this.script[seen.length]) : -1;
    if (column >= 0 && (h >>> 8) % 10 < 8) logits[column] += 8;
    return logits;
  }
}
