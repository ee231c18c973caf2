/** Measures the bundle's understudy in WebAssembly, one thread, under node: `npm run measure:understudy`. */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import * as ort from "onnxruntime-web/wasm";
import { parseTarget } from "../src/bundle/understudyStore.js";
import type { OnnxRuntime } from "../src/engine/onnx.js";
import { OnnxTarget } from "../src/engine/target.js";
import { ROOT } from "../test/python.js";

const folder = join(ROOT, process.argv[2] ?? "build/bundle", "understudy");
const [BEHIND, TIMES] = [128, 15];

ort.env.wasm.numThreads = 1;
const file = (name: string) => Uint8Array.from(readFileSync(join(folder, name)));
const { shape } = parseTarget(new TextDecoder().decode(file("manifest.json")));
const files = { model: file("target.onnx"), data: file("target.onnx.data"), dataName: "target.onnx.data", shape };

async function timed(run: () => Promise<unknown>): Promise<number> {
  const begun = performance.now();
  await run();
  return performance.now() - begun;
}

const text = Array.from({ length: BEHIND + 64 }, (_, index) => 20 + ((index * 37) % 9000));
let target: OnnxTarget | undefined;
const load = await timed(async () => {
  target = await OnnxTarget.load(ort as unknown as OnnxRuntime, files, 2048);
});
const model = target as OnnxTarget;
for (let at = 0; at < BEHIND; at += 64) await model.step(at, text.slice(at, at + 64), 1);
const token: number[] = [];
for (let turn = 0; turn < TIMES; turn++) token.push(await timed(() => model.step(BEHIND, [text[BEHIND]], 1)));
const prompt: number[] = [];
for (let turn = 0; turn < 3; turn++) prompt.push(await timed(() => model.step(BEHIND, text.slice(BEHIND), 1)));
const median = (times: number[]) => times.sort((a, b) => a - b)[Math.floor(times.length / 2)];
console.log(`load ${(load / 1000).toFixed(1)} s`);
console.log(`a token behind ${BEHIND}: median ${median(token).toFixed(0)} ms, fastest ${token[0].toFixed(0)} ms`);
console.log(`64 tokens of a prompt: median ${(median(prompt) / 1000).toFixed(2)} s`);
console.log(`the process: ${(process.memoryUsage().rss / 1e6).toFixed(0)} MB`);
await model.close();
