/** The drafter's worker: engine and drafting state live here, so that the page never waits for them. */

import { LocalDrafter } from "../answer/drafterThread.js";
import { Drafter } from "../drafting/drafter.js";
import { type DraftStep, type Engine, NoDrafter } from "../drafting/engine.js";
import { constraintOrNull } from "../protocol/constraint.js";
import { RowShape } from "../protocol/rows.js";
import { Sampling } from "../protocol/sampling.js";
import type { Job, PlainDraft, Provider, Reply, Request, Setup, Started } from "./messages.js";
import { EngineError, type EngineFiles, OnnxEngine, type OnnxRuntime } from "./onnx.js";
import { threadsFor } from "./threads.js";

/** Seconds for which an engine runs before it is measured: browsers recompile and optimise code that runs often. */
const WARM_UP = 0.4;
/** Steps of each engine that is measured; the median counts. */
const MEASURED_STEPS = 7;
/** A module with one instruction on vectors (i8x16.popcnt). */
const VECTORS = [
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11,
];
/** WebGPU has to be this much faster: it costs a second runtime, and memory of the graphics card. */
const WORTH_A_GPU = 0.8;

let drafter: LocalDrafter | null = null;

async function start(setup: Setup): Promise<Started> {
  const { files } = setup;
  const shape = { saKvHeads: setup.saKvHeads, caKvHeads: setup.caKvHeads, headDim: setup.headDim };
  const rowShape = new RowShape(setup.caKvHeads, setup.headDim);
  if (!files) {
    drafter = new LocalDrafter(new Drafter(new NoDrafter(), { ...setup, rowShape }), async () => {});
    return { provider: "wasm", threads: 1, stepSeconds: 0 };
  }
  if (!WebAssembly.validate(Uint8Array.from(VECTORS))) {
    throw new EngineError(
      "this browser's WebAssembly has no SIMD instructions, which the drafter needs; update the browser",
    );
  }
  const ort = await import("onnxruntime-web/wasm");
  ort.env.wasm.wasmPaths = setup.wasmUrl;
  const threads = threadsFor(setup.threads);
  ort.env.wasm.numThreads = threads;
  let engine = await OnnxEngine.load(ort as unknown as OnnxRuntime, files, shape);
  let [provider, stepSeconds]: [Provider, number] = ["wasm", await measure(engine, setup)];
  if (setup.provider !== "wasm" && (await gpu())) {
    const other = await onGpu(setup.wasmUrl, files, shape).catch(() => null);
    const seconds = other
      ? await measure(other, setup).catch(() => Number.POSITIVE_INFINITY)
      : Number.POSITIVE_INFINITY;
    if (other && (setup.provider === "webgpu" || seconds < WORTH_A_GPU * stepSeconds)) {
      await engine.close();
      engine = other;
      provider = "webgpu";
      stepSeconds = seconds;
    } else {
      await other?.close();
    }
  }
  drafter = new LocalDrafter(new Drafter(engine, { ...setup, rowShape }), () => engine.close());
  return { provider, threads: provider === "wasm" ? threads : 1, stepSeconds };
}

/** Return whether WebGPU has a graphics card. */
async function gpu(): Promise<boolean> {
  const { gpu } = navigator as Navigator & { gpu?: { requestAdapter(): Promise<unknown> } };
  return Boolean(await gpu?.requestAdapter().catch(() => null));
}

async function onGpu(
  wasmUrl: string,
  files: EngineFiles,
  shape: Pick<Setup, "saKvHeads" | "caKvHeads" | "headDim">,
): Promise<OnnxEngine> {
  const ort = await import("onnxruntime-web/webgpu");
  ort.env.wasm.wasmPaths = wasmUrl;
  return OnnxEngine.load(ort as unknown as OnnxRuntime, files, shape, "webgpu");
}

/** Return the median seconds of an eight-wide step after 128 tokens and as many feature rows. */
async function measure(engine: Engine, setup: Setup): Promise<number> {
  const [width, past] = [8, 128];
  const [sa, ca] = [past * setup.saKvHeads * setup.headDim, (past + 1) * setup.caKvHeads * setup.headDim];
  const tokens = Array.from(setup.draftIds.subarray(0, width));
  const step: DraftStep = {
    tokens,
    positions: tokens.map(() => past),
    wanted: tokens.map((_, index) => index),
    past,
    rows: past + 1,
    mask: new Float32Array(width * (past + width)),
    keys: new Float32Array(sa),
    values: new Float32Array(sa),
    rowKeys: new Float32Array(ca),
    rowValues: new Float32Array(ca),
  };
  const warm = performance.now() + 1000 * WARM_UP;
  const took: number[] = [];
  while (took.length < MEASURED_STEPS) {
    const began = performance.now();
    await engine.step(step);
    if (began > warm) took.push((performance.now() - began) / 1000);
  }
  return took.sort((one, other) => one - other)[MEASURED_STEPS >> 1];
}

function there(): LocalDrafter {
  if (!drafter) throw new EngineError("the drafter is not started");
  return drafter;
}

async function answer(request: Job): Promise<unknown> {
  switch (request.type) {
    case "start":
      return start(request.setup);
    case "draft": {
      const { prefix, shape, key } = request;
      const [sampling, constraint] = [new Sampling(request.sampling), constraintOrNull(request.constraint)];
      const { result, seconds } = await there().draft(prefix, sampling, shape, key, constraint);
      const { tree, ...others } = result;
      const plain: PlainDraft = { ...others, tokens: tree.tokens, parents: tree.parents };
      return { result: plain, seconds };
    }
    case "nextToken":
      return there().nextToken(request.prefix, new Sampling(request.sampling), constraintOrNull(request.constraint));
    case "draftAhead":
      return there().draftAhead(request.shape, request.key);
    case "close":
      await drafter?.close();
      return null;
  }
}

addEventListener("message", ({ data }: MessageEvent<Request>) => {
  if (data.type === "want") drafter?.want(data.key, data.silent);
  else if (data.type === "addRows") drafter?.addRows(data.positions, data.rows);
  else if (data.type === "keepRows") drafter?.keepRows(data.length);
  else if (data.type === "remember") drafter?.remember(data.text);
  else if (data.type === "forget") drafter?.forget();
  else {
    const { id } = data;
    const reply = (of: Reply) => postMessage(of);
    answer(data).then(
      result => reply({ id, result }),
      error => reply({ id, error: error instanceof Error ? error.message : String(error) }),
    );
  }
});
