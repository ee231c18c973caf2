import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import * as ort from "onnxruntime-web/wasm";
import type { DraftStep } from "../src/drafting/engine.js";
import { expand } from "../src/engine/expand.js";
import { EngineError, OnnxEngine, type OnnxRuntime } from "../src/engine/onnx.js";
import { BUNDLE } from "./vectors.js";

ort.env.wasm.numThreads = 1;
const runtime = ort as unknown as OnnxRuntime;
const file = (name: string) => Uint8Array.from(readFileSync(join(BUNDLE, name)));
const files = { model: file("drafter.onnx"), data: file("drafter.onnx.data"), dataName: "drafter.onnx.data" };
const shape = { saKvHeads: 3, caKvHeads: 3, headDim: 64 };

/** Make a step of `width` tokens after `past` others and as many feature rows; the numbers are the same in every run. */
function step(width: number, past: number): DraftStep {
  const wave = (size: number) => Float32Array.from({ length: size }, (_, i) => Math.sin(1 + 0.37 * i) * 0.7);
  const tokens = Array.from({ length: width }, (_, i) => 504 + 97 * i);
  const mask = new Float32Array(width * (past + width));
  for (let row = 0; row < width; row++)
    mask.fill(-1e9, row * (past + width) + past + row + 1, (row + 1) * (past + width));
  return {
    tokens,
    positions: tokens.map((_, i) => past + i),
    wanted: tokens.map((_, i) => i),
    past,
    rows: past + 1,
    mask,
    keys: wave(past * 192),
    values: wave(past * 192),
    rowKeys: wave((past + 1) * 192),
    rowValues: wave((past + 1) * 192),
  };
}

test("expanded tables compute what the file's own tables compute, up to its rounding of activations", async () => {
  assert.ok(expand(files.model, files.data));
  const fast = await OnnxEngine.load(runtime, files, shape);
  const plain = await OnnxEngine.load(runtime, files, shape, "wasm", false);
  for (const [width, past] of [
    [1, 0],
    [8, 40],
    [32, 3],
  ]) {
    const [one, other] = [await fast.step(step(width, past)), await plain.step(step(width, past))];
    assert.equal(one.logits.length, width * 12288);
    assert.ok(distance(one.logits, other.logits) < 0.02, `${width}, ${past}: ${distance(one.logits, other.logits)}`);
    assert.ok(distance(one.keys, other.keys) < 0.02);
  }
  await fast.close();
  await plain.close();
});

test("what is no model is refused in one line", async () => {
  await assert.rejects(OnnxEngine.load(runtime, { ...files, data: null }, shape), EngineError);
  const loaded = OnnxEngine.load(runtime, { ...files, model: files.model.slice(0, 5000) }, shape);
  await assert.rejects(loaded, (error: Error) => error instanceof EngineError && !error.message.includes("\n"));
});

/** Return the largest difference, divided by the largest value. */
function distance(one: Float32Array, other: Float32Array): number {
  let [apart, most] = [0, 0];
  for (let i = 0; i < one.length; i++) {
    apart = Math.max(apart, Math.abs(one[i] - other[i]));
    most = Math.max(most, Math.abs(other[i]));
  }
  return apart / most;
}
