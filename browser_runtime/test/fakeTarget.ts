/** A complete small model in this process that predicts the text of the fake verifier's target. */

import assert from "node:assert/strict";
import type { TargetModel } from "../src/targets/understudy.js";
import { ALPHABET, target } from "./fakeVerifier.js";

export class FakeTarget implements TargetModel {
  steps = 0;
  /** The next step fails. */
  broken = false;
  private text: number[] = [];

  constructor(readonly maxContext: number) {}

  async step(past: number, tokens: readonly number[], wanted: number): Promise<Float32Array[]> {
    assert.ok(past <= this.text.length && past + tokens.length <= this.maxContext);
    if (this.broken) throw new Error("out of memory");
    this.steps++;
    this.text = [...this.text.slice(0, past), ...tokens];
    const size = this.text.length;
    return Array.from({ length: wanted }, (_, row) => {
      const logits = new Float32Array(ALPHABET);
      logits[target(this.text.slice(0, size - wanted + 1 + row))] = 8;
      return logits;
    });
  }

  async close(): Promise<void> {}
}
