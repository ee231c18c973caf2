/** The ways an answer can end, shared by the session, the endpoints, the ports and the command line. */

/**
 * stop: the model ended it, or a stop string. length: the limit of tokens was reached, or the device's drafter only repeated
 * itself. tool_calls: the model ended it, and it calls functions. cancelled: the client cancelled it. refused: the verifier
 * refused the request permanently. unreachable: the verifier did not return in time, and the text is incomplete. failed: an
 * engine failed.
 *
 * Unverified text is marked as such, however the answer ended.
 */
export type FinishReason = "stop" | "length" | "tool_calls" | "cancelled" | "refused" | "unreachable" | "failed";

/** Endings of an answer whose text is complete. */
export const COMPLETE: readonly FinishReason[] = ["stop", "length", "tool_calls"];

/** Whether an answer that may call functions has called some, all of them completely. */
export function endsWithCall(text: string): boolean {
  return text.endsWith("}\n</tool_call>"); // JSON has no raw newlines
}
