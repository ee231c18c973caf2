import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import * as ort from "onnxruntime-web/wasm";
import { parseTarget, type TargetFiles } from "../src/bundle/understudyStore.js";
import type { OnnxRuntime } from "../src/engine/onnx.js";
import { OnnxTarget } from "../src/engine/target.js";
import { Constraint } from "../src/protocol/constraint.js";
import { Sampling } from "../src/protocol/sampling.js";
import { repetitions, Understudy } from "../src/targets/understudy.js";
import { PYTHON, ROOT } from "./python.js";
import { type Any, sampling } from "./vectors.js";

ort.env.wasm.numThreads = 1;
const runtime = ort as unknown as OnnxRuntime;
const folder = mkdtempSync(join(tmpdir(), "outrider-understudy-"));
let expected: Any;
let files: TargetFiles;

before(() => {
  execFileSync(PYTHON, ["-m", "tests.browser.make_understudy", folder], {
    cwd: ROOT,
    stdio: ["ignore", "ignore", "pipe"],
  });
  const text = readFileSync(join(folder, "expected.json"), "utf8");
  expected = JSON.parse(text);
  const file = (name: string) => Uint8Array.from(readFileSync(join(folder, "bundle/understudy", name)));
  const { shape } = parseTarget(new TextDecoder().decode(file("manifest.json")));
  files = { model: file("target.onnx"), data: file("target.onnx.data"), dataName: "target.onnx.data", shape };
});
after(() => rmSync(folder, { recursive: true, force: true }));

async function understudy(decode: (ids: readonly number[]) => string = () => ""): Promise<Understudy> {
  return new Understudy(await OnnxTarget.load(runtime, files, expected.context), expected.vocab, decode);
}

test("products of unsigned and signed bytes are exact here", async () => {
  const [rows, depth] = [9, 64];
  const session = await ort.InferenceSession.create(readFileSync(join(folder, "bundle/understudy/products.onnx")));
  const activations = new ort.Tensor("uint8", new Uint8Array(rows * depth).fill(255), [rows, depth]);
  const sums = (await session.run({ activations })).product.data as Int32Array;
  await session.release();
  let largest = 0; // of the table that `outrider_core.targets.products` writes
  for (let row = 0; row < depth; row++) largest += 255 * (row % 3 ? 127 : -128);
  assert.ok(sums.every(sum => sum === largest));
});

test("logits are Python's: a prompt over two blocks, tokens, judged drafts, overwritten text, to the end", async () => {
  const bytes = readFileSync(join(folder, "logits.f32"));
  const wanted = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
  const model = await OnnxTarget.load(runtime, files, expected.context);
  let at = 0;
  let [apart, most, sum] = [0, 0, 0];
  for (const { past, tokens, wanted: count } of expected.steps) {
    for (const row of await model.step(past, tokens, count)) {
      for (const value of row) {
        most = Math.max(most, Math.abs(wanted[at]));
        const difference = Math.abs(value - wanted[at++]);
        apart = Math.max(apart, difference);
        sum += difference;
      }
    }
  }
  assert.equal(at, wanted.length);
  // kernels differ in the last bits, and now and then an activation is rounded to the next of its 8-bit steps
  const mean = sum / at;
  assert.ok(apart < 0.05 * most && mean < 0.002 * most, `${apart} at most, ${mean} on average, of ${most}`);
  await assert.rejects(model.step(expected.context - 1, [1, 2], 1), RangeError);
  await model.close();
});

test("it judges drafts, writes and leaves a loop as Python's does", async () => {
  for (const [index, { text, begin, drafted, count, sampling: settings }] of expected.answers.entries()) {
    const found = expected.found[index];
    const one = await understudy();
    const decoding = { promptLength: begin, sampling: sampling(settings) };
    const whole = [...text, ...drafted];
    const agreed = await one.agreed(whole, text.length, decoding);
    assert.equal(agreed, found.agreed);
    const written = [...text, ...found.tokens.slice(0, agreed)];
    const probabilities: number[] = [];
    for (let token = 0; token < count; token++) {
      const next = (await one.nextToken(written, decoding))!;
      written.push(next.token);
      probabilities.push(next.probability);
    }
    assert.deepEqual(written.slice(text.length), found.tokens, `${index}`);
    for (const [place, value] of (found.probabilities ?? []).entries()) {
      assert.ok(Math.abs(probabilities[place] - value) < 0.05 * value, `${probabilities[place]} for ${value}`);
    }
    await one.close();
  }
});

test("inside code a loop is let be, and what nobody wants is given up and goes on later", async () => {
  const loop = expected.answers.length - 2;
  const { text, begin, sampling: settings } = expected.answers[loop];
  const decoding = { promptLength: begin, sampling: sampling(settings) };
  const inCode = await understudy(ids => "```".repeat(Math.min(1, ids.length)));
  const free = expected.found[loop + 1].tokens[0]; // if nothing counts as repeated
  assert.equal((await inCode.nextToken(text, decoding))!.token, free);
  assert.notEqual(expected.found[loop].tokens[0], free);
  let asked = 0;
  const cancelled = async () => ++asked >= 3;
  const behind = { promptLength: 100, sampling: decoding.sampling };
  const other = await understudy();
  const long = Array.from({ length: 150 }, (_, index) => 4 + ((7 * index) % 190));
  assert.equal(await other.nextToken(long, behind, cancelled), null);
  assert.equal(await other.agreed(long, 100, behind, async () => true), null);
  const fresh = await understudy();
  assert.deepEqual(await other.nextToken(long, behind), await fresh.nextToken(long, behind));
  assert.equal(repetitions(long.slice(0, 40)).size, 0);
  for (const one of [inCode, other, fresh]) await one.close();
});

test("it drafts what it writes where no loop is broken, and nothing anew behind an accepted prefix", async () => {
  for (const { text, sampling: settings } of expected.answers) {
    const [one, writer] = [await understudy(), await understudy()];
    const decoding = { promptLength: text.length, sampling: sampling(settings) };
    const written: number[] = [...text];
    // before an answer begins, nothing is repeated
    while (written.length < text.length + 20) {
      written.push((await writer.nextToken(written, { ...decoding, promptLength: written.length }))!.token);
    }
    const foreseen = written.slice(text.length);
    const { tokens, scores } = await one.draft(text, 8, decoding);
    assert.deepEqual(tokens, foreseen.slice(0, 8));
    assert.ok(scores.length === 8 && scores.every((score, place) => score <= (scores[place - 1] ?? 0)));
    await one.draftAhead(8, async () => false);
    assert.equal(one.drafted, 16);
    const whole = await one.draft(text, 16, decoding);
    assert.deepEqual(whole.tokens, foreseen.slice(0, 16));
    // the target drew the same, and one more predicted token
    const accepted = written.slice(0, text.length + 9);
    const rest = await one.draft(accepted, 7, decoding);
    assert.deepEqual(rest.tokens, foreseen.slice(9, 16));
    for (const [place, score] of rest.scores.entries()) {
      assert.ok(Math.abs(score - (whole.scores[9 + place] - whole.scores[8])) < 1e-9);
    }
    assert.deepEqual((await one.draft(accepted, 3, decoding)).tokens, foreseen.slice(9, 12));
    assert.equal(one.drafted, 16);
    // it drew another token
    const other = [...accepted, (foreseen[9] + 1) % 190];
    const fresh = await understudy();
    assert.deepEqual((await one.draft(other, 5, decoding)).tokens, (await fresh.draft(other, 5, decoding)).tokens);
    assert.equal(one.drafted, 21);
    for (const each of [one, writer, fresh]) await each.close();
  }
});

test("a draft is given up, ends with the context, and is another's under another constraint", async () => {
  const one = await understudy();
  const { text } = expected.answers[0];
  const greedy = { promptLength: text.length, sampling: new Sampling() };
  assert.deepEqual(await one.draft(text, 8, greedy, async () => true), { tokens: [], scores: [] });
  let asked = 0;
  const some = (await one.draft(text, 8, greedy, async () => ++asked >= 6)).tokens.length;
  assert.ok(some > 0 && some < 8);
  const free = (await one.draft(text, 6, greedy)).tokens;
  const held = new Constraint({ begin: text.length, biases: new Map([[free[0], -100]]) });
  const bound = (await one.draft(text, 6, { ...greedy, constraint: held })).tokens;
  assert.ok(!bound.includes(free[0]));
  const before = one.drafted;
  const same = new Constraint({ begin: text.length, biases: new Map([[free[0], -100]]) });
  assert.deepEqual((await one.draft(text, 6, { ...greedy, constraint: same })).tokens, bound);
  assert.equal(one.drafted, before);
  assert.deepEqual((await one.draft(text, 6, greedy)).tokens, free);
  const long = Array.from({ length: expected.context - 3 }, (_, index) => 4 + ((7 * index) % 190));
  assert.equal((await one.draft(long, 8, greedy)).tokens.length, 3);
  await one.draftAhead(8, async () => false);
  await one.close();
});
