/** Outrider's device side for browsers: draft on the device, verify in the cloud, go on when the link is cut. */

export { Bundle } from "./bundle/bundle.js";
export type { ChatMessage, ToolCall } from "./bundle/chatBoundary.js";
export { BundleError, type Manifest, type UnderstudyEntry } from "./bundle/manifest.js";
export { BundleStore, type Progress } from "./bundle/store.js";
export { UnderstudyStore } from "./bundle/understudyStore.js";
export { type TreeShape, treeShape } from "./drafting/drafter.js";
export type { Provider, Started } from "./engine/messages.js";
export { EngineError } from "./engine/onnx.js";
export { type DrafterOptions, startDrafter, type WorkerDrafter } from "./engine/workerDrafter.js";
export { openUnderstudy, type UnderstudyOptions, type WorkerUnderstudy } from "./engine/workerUnderstudy.js";
export { Sampling, type SamplingOptions } from "./protocol/sampling.js";
export { DrafterFailed, type Sight } from "./runtime/answer.js";
export type { FittedMessages } from "./runtime/context.js";
export type { DrafterThread } from "./runtime/drafterThread.js";
export { EdgeRuntime, type Options, type Request } from "./runtime/edgeRuntime.js";
export type * from "./runtime/events.js";
export type { FormOptions, JsonSchema, ResponseFormat, Tool, ToolChoice } from "./runtime/form.js";
export { LinkRefused, type Traffic } from "./runtime/link.js";
export type { Mode, Policy } from "./runtime/policy.js";
export type { AnswerRecord } from "./runtime/record.js";
export type { FinishReason } from "./runtime/states.js";
export type { Patience } from "./runtime/timing.js";
export type { UnderstudyThread } from "./runtime/understudyThread.js";
export { Weather } from "./runtime/weather.js";
