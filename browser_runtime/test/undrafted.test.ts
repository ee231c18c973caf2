/** A bundle without a drafter: its understudy drafts and writes, and lookup alone makes trees. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { LocalDrafter } from "../src/answer/drafterThread.js";
import { LocalUnderstudy } from "../src/answer/understudyThread.js";
import type { Bundle } from "../src/bundle/bundle.js";
import { BundleError, neededFiles, parseManifest } from "../src/bundle/manifest.js";
import { Drafter, treeShape } from "../src/drafting/drafter.js";
import { NoDrafter } from "../src/drafting/engine.js";
import { RowShape } from "../src/protocol/rows.js";
import { Sampling } from "../src/protocol/sampling.js";
import { EdgeRuntime, type Options } from "../src/runtime.js";
import { Understudy } from "../src/targets/understudy.js";
import { FakeTarget } from "./fakeTarget.js";
import { FakeVerifier, plain } from "./fakeVerifier.js";
import { bundle, PROMPT, read } from "./runtimes.js";

const undrafted = {
  ...bundle,
  manifest: { ...bundle.manifest, drafterHash: "", engineFile: null },
  rowShape: new RowShape(1, 1),
} as unknown as Bundle;

const drafterOf = () =>
  new Drafter(new NoDrafter(), { draftIds: [0], rowShape: new RowShape(1, 1), saKvHeads: 1, maxContext: 200 });

function runtimeOf(verifier: FakeVerifier | null, options: Options = {}): EdgeRuntime {
  const understudy = new LocalUnderstudy(async () => new Understudy(new FakeTarget(200), 64, () => ""));
  const drafter = new LocalDrafter(drafterOf(), async () => {});
  const given = { makeSocket: verifier?.makeSocket, understudy, ...options };
  return new EdgeRuntime(undrafted, drafter, verifier ? "127.0.0.1:1" : null, given);
}

test("lookup alone makes trees", async () => {
  const text = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8];
  for (const sampling of [new Sampling(), new Sampling({ temperature: 1, seed: 3 })]) {
    const { tree } = await drafterOf().draft(text, sampling, treeShape({ nodes: 3 }));
    assert.deepEqual([...tree.tokens], [9, 10, 11]);
    assert.equal((await drafterOf().draft([5, 6, 7], sampling, treeShape())).tree.size, 0);
  }
});

test("answers over a link with a cut are the target's", async () => {
  const verifier = new FakeVerifier();
  const runtime = runtimeOf(verifier, { mode: "tree", shaping: false });
  for (const cut of [true, false, true]) {
    let cuts = cut ? 1 : 0;
    const end = await read(runtime.generate(PROMPT, { maxNewTokens: 60 }), event => {
      if (event.type === "verified" && event.verified.length > 20 && cuts-- > 0) verifier.kill();
    });
    assert.deepEqual(end.tokenIds, plain(PROMPT, 60));
    assert.ok(end.stats.chains > 0 && end.stats.chained > end.stats.chains);
    assert.ok(end.spans.every(span => span.writer !== "drafter"));
  }
  await runtime.close();
});

test("without a verifier the understudy writes everything, and an answer fails if it is off", async () => {
  const alone = runtimeOf(null);
  const end = await read(alone.generate(PROMPT, { maxNewTokens: 12 }));
  assert.deepEqual([end.tokenIds, end.stats.understudy], [plain(PROMPT, 12), end.tokenIds.length]);
  await alone.close();
  const silent = runtimeOf(null, { policy: { understudy: "off" } });
  assert.equal((await read(silent.generate(PROMPT, { maxNewTokens: 12 }))).reason, "unreachable");
  await silent.close();
});

test("an understudy writes none of the ids that are barred", async () => {
  const [first] = plain(PROMPT, 1);
  const understudy = new Understudy(new FakeTarget(200), 64, () => "", [first, 4000]);
  const written = await understudy.nextToken(PROMPT, { promptLength: 3, sampling: new Sampling() });
  assert.ok(written && written.token !== first);
});

test("a manifest may describe no drafter, but then an understudy", () => {
  const file = { sha256: "0".repeat(64), bytes: 1 };
  const names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
  const files = Object.fromEntries(names.map(name => [name, file]));
  const texts = { target: "t", target_hash: "t", drafter_hash: "", draft_ids_file: null, null_row_file: null };
  const understudy = { folder: "understudy", name: "u", format: "onnx", bytes: 1, manifest_sha256: file.sha256 };
  const raw = { format_version: 2, vocab_size: 9, eos_ids: [1], max_context: 9, engines: {}, files, ...texts };
  const manifest = parseManifest(JSON.stringify({ ...raw, understudy: { ...understudy, barred: [7] } }));
  assert.deepEqual([manifest.engineFile, manifest.understudy?.barred, manifest.headDim], [null, [7], 1]);
  assert.deepEqual(neededFiles(manifest), names);
  assert.throws(() => parseManifest(JSON.stringify({ ...raw, understudy: null })), BundleError);
});
