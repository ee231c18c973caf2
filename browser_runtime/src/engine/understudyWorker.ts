/** The understudy's worker: a separate model beside the drafter's, whose memory is freed with the worker. */

import { LocalUnderstudy } from "../answer/understudyThread.js";
import { UnderstudyStore } from "../bundle/understudyStore.js";
import { constraintOrNull } from "../protocol/constraint.js";
import { Sampling } from "../protocol/sampling.js";
import { Understudy } from "../targets/understudy.js";
import type { OnnxRuntime } from "./onnx.js";
import { OnnxTarget } from "./target.js";
import { threadsFor } from "./threads.js";
import type { UnderstudyJob, UnderstudyRequest, UnderstudySetup } from "./understudyMessages.js";

let thread: LocalUnderstudy | null = null;
/** Jobs that are no longer wanted. */
const cancelledJobs = new Set<number>();

async function open(setup: UnderstudySetup): Promise<Understudy> {
  const ort = await import("onnxruntime-web/wasm");
  ort.env.wasm.wasmPaths = setup.wasmUrl;
  ort.env.wasm.numThreads = threadsFor(setup.threads);
  const files = await new UnderstudyStore(setup.store).read(setup.entry);
  const model = await OnnxTarget.load(ort as unknown as OnnxRuntime, files, setup.maxContext);
  const marks = new Map(setup.marks);
  const decode = (ids: readonly number[]) => ids.map(id => marks.get(id) ?? " ").join("");
  return new Understudy(model, setup.vocabSize, decode, setup.entry.barred);
}

async function answer(job: UnderstudyJob, id: number): Promise<unknown> {
  if (job.type === "start") {
    thread = new LocalUnderstudy(() => open(job.setup));
    return null;
  }
  if (!thread) throw new Error("the understudy is not started");
  const cancelled = () => cancelledJobs.has(id);
  if (job.type === "draftAhead") return thread.draftAhead(job.count, cancelled);
  const of = { ...job, sampling: new Sampling(job.sampling), constraint: constraintOrNull(job.constraint) };
  switch (job.type) {
    case "agreed":
      return thread.agreed(of, job.base, cancelled);
    case "nextToken":
      return thread.nextToken(of, cancelled);
    case "draft":
      return thread.draft(of, job.count, cancelled);
  }
}

addEventListener("message", ({ data }: MessageEvent<UnderstudyRequest>) => {
  if (data.type === "cancel") {
    cancelledJobs.add(data.of);
    return;
  }
  const { id } = data;
  answer(data, id)
    .then(
      result => postMessage({ id, result }),
      error => postMessage({ id, error: error instanceof Error ? error.message : String(error) }),
    )
    .finally(() => cancelledJobs.delete(id));
});
