/** Outrider's device side for browsers: draft on the device, verify in the cloud, continue when the link is cut. */

export { DrafterFailed, type Sight } from "./answer/answer.js";
export type { DrafterThread } from "./answer/drafterThread.js";
export type { UnderstudyThread } from "./answer/understudyThread.js";
export { Bundle } from "./bundle/bundle.js";
export type { ChatMessage, ToolCall } from "./bundle/chatBoundary.js";
export { BundleError, type Manifest, type UnderstudyEntry } from "./bundle/manifest.js";
export { BundleStore, type Progress } from "./bundle/store.js";
export { UnderstudyStore } from "./bundle/understudyStore.js";
export type { FittedMessages } from "./context.js";
export { type TreeShape, treeShape } from "./drafting/drafter.js";
export type { Provider, Started } from "./engine/messages.js";
export { EngineError } from "./engine/onnx.js";
export { type DrafterOptions, startDrafter, type WorkerDrafter } from "./engine/workerDrafter.js";
export { openUnderstudy, type UnderstudyOptions, type WorkerUnderstudy } from "./engine/workerUnderstudy.js";
export type * from "./events.js";
export type { FormOptions, JsonSchema, ResponseFormat, Tool, ToolChoice } from "./form.js";
export { LinkRefused } from "./link/address.js";
export type { TokenProvider } from "./link/authorization.js";
export { Weather } from "./link/weather.js";
export type { Traffic } from "./link/websocket.js";
export type { FinishReason } from "./protocol/ending.js";
export { Sampling, type SamplingOptions } from "./protocol/sampling.js";
export { EdgeRuntime, type Options, type Request } from "./runtime.js";
export type { Policy } from "./session/policy.js";
export type { AnswerRecord } from "./session/record.js";
export type { Patience } from "./session/timeouts.js";
export type { Arm } from "./speed/arms.js";
