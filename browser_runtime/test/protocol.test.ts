import assert from "node:assert/strict";
import { test } from "node:test";
import { encode as pack } from "@msgpack/msgpack";
import { CostCurve } from "../src/protocol/costs.js";
import { COMPLETE, endsWithCall } from "../src/protocol/ending.js";
import { Noise } from "../src/protocol/noise.js";
import { halfToFloat, RowShape, unpackRows } from "../src/protocol/rows.js";
import { draw, logProbs, Sampling } from "../src/protocol/sampling.js";
import { StopStrings } from "../src/protocol/text.js";
import { MAX_NODES, ROOT, TokenTree, TreeError } from "../src/protocol/tree.js";
import { decodeServer, encode, WireError } from "../src/protocol/wire.js";
import { counted, fields, fromHex, message, read, same, sampling, toHex } from "./vectors.js";

const CLIENT = ["Hello", "Open", "Verify", "Generate", "Cancel", "Close"];

test("every frame is encoded as the vectors have it, and what verifiers send is decoded", () => {
  const rows = read("frames");
  const types = new Set<string>();
  for (const row of rows) {
    assert.equal(toHex(encode(message(row.fields))), row.hex, row.name);
    types.add(row.fields.type);
    if (CLIENT.includes(row.fields.type)) assert.throws(() => decodeServer(fromHex(row.hex)), WireError, row.name);
    else assert.ok(same(fields(decodeServer(fromHex(row.hex))), row.fields), row.name);
  }
  assert.equal(types.size, 12);
  counted("frames", rows.length);
});

test("fields of later versions are passed over, those of earlier ones filled in", () => {
  const frame = (values: unknown[]) => Uint8Array.of(...pack(values), 0x80);
  const opened = decodeServer(frame([4, 3, 7, 2, "later", [[1.5, new Uint8Array(300)], true], -40000]));
  assert.deepEqual(opened, { type: "Opened", stream: 3, committed: 7, cached: 2 });
  const none = new Uint8Array();
  const verdict = decodeServer(frame([7, 0, 1, 4, none, 17, 0, none]));
  assert.ok(verdict.type === "Verdict");
  assert.deepEqual([verdict.treeBudget, verdict.queueUs, verdict.engineUs], [0, 0, 0]);
  const welcome = decodeServer(frame([2, 1, "", "", 1, 1, 1, 1]));
  assert.ok(welcome.type === "Welcome");
  assert.deepEqual([welcome.streamTokens, welcome.queueUs], [0, 0]);
});

test("fields out of their bounds, and bytes that are no message, throw WireError alone", () => {
  const wrong: unknown[][] = [
    [4, 65536, 1, 1],
    [4, -1, 1, 1],
    [4, 1, 2 ** 31, 1],
    [4, 1, 1.5, 1],
    [4, "1", 1, 1],
    [4, 1],
    [7, 0, 1, 4, new Uint8Array(256), 17, 0, new Uint8Array()],
    [7, 0, 1, 4, new Uint8Array(), 17, 16, new Uint8Array()],
    [2, 1, "", "", 1, 1, 1, 1, "", new Uint8Array(), 0, "", -1],
    [2, 1, "", "", 1, 1, 1, 1, "", new Uint8Array(), 0, "", 10_000],
    [2, 1, "", "", 1, 1, 1, 1, "", new Uint8Array(), 0, "", 100, 2 ** 31],
    [12, 256, ""],
    [12, 1, "x".repeat(513)],
    [99],
    [],
  ];
  for (const values of wrong) {
    assert.throws(() => decodeServer(Uint8Array.of(...pack(values), 0x80)), WireError, JSON.stringify(values));
  }
  let state = 1;
  const random = (below: number) => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return (state >>> 8) % below;
  };
  const frames = read("frames").map(row => fromHex(row.hex));
  for (let round = 0; round < 4000; round++) {
    const frame = frames[random(frames.length)].slice();
    for (let change = random(4); change >= 0; change--) frame[random(frame.length)] = random(256);
    try {
      decodeServer(random(2) ? frame : frame.subarray(0, random(frame.length)));
    } catch (error) {
      assert.ok(error instanceof WireError, String(error));
    }
  }
});

test("noise follows the vectors", () => {
  const rows = read("noise");
  for (const row of rows) {
    const noise = new Noise(BigInt(row.seed), row.position);
    assert.equal(noise.hash(row.token), row.h);
    assert.ok(
      Math.abs(noise.gumbel(row.token) - row.g) <= 1e-13 * Math.max(1, Math.abs(row.g)),
      `${row.seed} ${row.position}`,
    );
  }
  assert.ok(rows.length >= 200);
  counted("noise", rows.length);
});

test("distributions and draws follow the vectors", () => {
  const rows = read("sampling");
  for (const row of rows) {
    const logits = Float32Array.from(row.logits);
    const law = logProbs(logits, sampling(row.sampling));
    assert.equal(law.length, row.law.length);
    for (const [token, value] of row.law.entries()) {
      if (value === null) assert.equal(law[token], Number.NEGATIVE_INFINITY);
      else assert.ok(Math.abs(law[token] - value) < 1e-9);
    }
    assert.equal(draw(logits, sampling(row.sampling), row.position), row.token);
  }
  counted("sampling", rows.length);
});

test("sampling parameters have bounds", () => {
  for (const wrong of [
    { temperature: -0.1 },
    { temperature: 101 },
    { temperature: Number.NaN },
    { topK: -1 },
    { topK: 2 ** 32 },
    { topK: 1.5 },
    { topP: 0 },
    { topP: 1.1 },
    { minP: 2 },
    { seed: -1 },
    { seed: 2n ** 63n },
    { seed: 2 ** 60 + 0.5 },
  ]) {
    assert.throws(() => new Sampling(wrong), RangeError, Object.keys(wrong)[0]);
  }
});

test("rows follow the vectors", () => {
  const rows = read("rows");
  for (const row of rows) {
    const shape = new RowShape(row.heads, row.head_dim);
    assert.deepEqual(Array.from(unpackRows(fromHex(row.hex), shape), zero), row.values.map(zero));
    assert.throws(() => unpackRows(fromHex(`${row.hex}00`), shape), RangeError);
  }
  counted("rows", rows.length);
  for (const [bits, value] of [
    [0x0001, 2 ** -24],
    [0x03ff, 1023 * 2 ** -24],
    [0x3c00, 1],
    [0xc000, -2],
    [0x7bff, 65504],
    [0x7c00, Number.POSITIVE_INFINITY],
  ]) {
    assert.equal(halfToFloat(bits), value);
  }
});

test("cost curves follow the vectors", () => {
  const rows = read("costs");
  for (const row of rows) {
    const curve = CostCurve.unpack(fromHex(row.hex));
    if (row.seconds === null) {
      assert.equal(curve, null);
      continue;
    }
    for (const [index, step] of row.steps.entries()) {
      assert.ok(Math.abs(curve!.at(step) - row.seconds[index]) < 1e-12);
    }
  }
  counted("costs", rows.length);
});

test("stop strings follow the vectors", () => {
  const rows = read("stops");
  for (const row of rows) {
    const stops = new StopStrings(row.stops);
    const shown = row.pieces.map((piece: string) => stops.push(piece));
    assert.deepEqual([...shown, stops.flush()], row.shown);
    assert.equal(stops.hit, row.hit);
  }
  counted("stops", rows.length);
});

test("answers end as the vectors say", () => {
  const rows = read("endings");
  const complete = rows.filter(row => row.complete).map(row => row.reason);
  assert.deepEqual(COMPLETE, complete);
  for (const row of rows.filter(row => "text" in row)) assert.equal(endsWithCall(row.text), row.calls, row.text);
  counted("endings", rows.length);
});

test("trees know their shape, prune, and refuse what is no tree", () => {
  const tree = new TokenTree([11, 12, 300, 11, 49151], [-1, -1, 0, 1, 3]);
  assert.deepEqual(tree.depths, [1, 1, 2, 2, 3]);
  assert.deepEqual(tree.path(4), [1, 3, 4]);
  assert.deepEqual([tree.child(1, 11), tree.child(ROOT, 11), tree.child(0, 11)], [3, 0, undefined]);
  assert.deepEqual(tree.pruned(3, 9).tokens, [11, 12, 300]);
  assert.deepEqual(tree.pruned(9, 1).tokens, [11, 12]);
  assert.equal(tree.pruned(-1, 9).size, 0);
  assert.equal(tree.pruned(5, 3), tree);
  assert.deepEqual(TokenTree.chain([5, 6, 7]).parents, [-1, 0, 1]);
  const wrong: [number[], number[]][] = [
    [[1], []],
    [
      [1, 2],
      [-1, 1],
    ],
    [[1], [-2]],
    [
      [1, 1],
      [-1, -1],
    ],
  ];
  for (const [tokens, parents] of wrong) assert.throws(() => new TokenTree(tokens, parents), TreeError);
  assert.throws(() => TokenTree.chain(Array.from({ length: MAX_NODES + 1 }, (_, i) => i)), TreeError);
});

/** The vectors' JSON has 0 where a row may have -0. */
function zero(value: number): number {
  return value === 0 ? 0 : value;
}
