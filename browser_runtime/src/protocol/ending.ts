/** The ways an answer can end, shared by the session, the endpoints, the ports and the command line. */

/**
 * stop: its own end, or a stop string. length: as long as it may be, or the device's drafter only repeated itself.
 * tool_calls: its own end, and it calls functions. cancelled: the client gave it up. refused: the verifier refused it for
 * good. unreachable: the verifier did not return in time, and the text is incomplete. failed: an engine failed.
 *
 * Text that nobody verified is marked as such, however the answer ended.
 */
export type FinishReason = "stop" | "length" | "tool_calls" | "cancelled" | "refused" | "unreachable" | "failed";

/** Endings of an answer whose text is complete. */
export const COMPLETE: readonly FinishReason[] = ["stop", "length", "tool_calls"];

/** Whether an answer that may call functions has called some, all of them completely. */
export function endsWithCall(text: string): boolean {
  return text.endsWith("}\n</tool_call>"); // no raw newline stands in JSON
}
