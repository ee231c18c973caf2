/** Fits a conversation into the context: the oldest turns go first, what the system said stays. */

import type { ChatMessage } from "./bundle/chatBoundary.js";

/** Roles that instruct the model and are never dropped from a conversation's beginning. */
const INSTRUCTIONS = ["system", "developer"];

/** messages: what fits, with the instructions first; dropped: what was left out, oldest first; ids: as tokens. */
export interface FittedMessages {
  messages: ChatMessage[];
  dropped: ChatMessage[];
  ids: number[];
}

/**
 * Drop whole turns (a user's message and what follows it) from the beginning until the rest fits.
 *
 * encode: renders a conversation as token ids. maxContext: tokens of prompt and answer together. reserve: tokens to keep
 * free for the answer; at most half of the context, and given up before the last turn is. Throws RangeError where the last
 * turn alone leaves no token free, or where there is no message.
 */
export function fitMessages(
  messages: readonly ChatMessage[],
  encode: (messages: ChatMessage[]) => number[],
  maxContext: number,
  reserve: number,
): FittedMessages {
  if (!messages.length) throw new RangeError("there is no message to answer");
  const first = messages.findIndex(({ role }) => !INSTRUCTIONS.includes(role));
  const instructions = messages.slice(0, first < 0 ? messages.length : first);
  const turns = messages.slice(instructions.length);
  const starts = [0, ...turns.keys()].filter((at, index) => index === 0 || (at > 0 && turns[at].role === "user"));
  const room = maxContext - Math.max(1, Math.min(reserve, maxContext >> 1));
  const encoded = (start: number) => encode([...instructions, ...turns.slice(start)]);
  // fewer turns are fewer tokens, so a search by halves finds the first start that fits
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (encoded(starts[middle]).length <= room) high = middle;
    else low = middle + 1;
  }
  const start = starts[low];
  const ids = encoded(start);
  if (ids.length >= maxContext) {
    throw new RangeError(`the last message has ${ids.length} tokens with its instructions; ${maxContext - 1} fit`);
  }
  return { messages: [...instructions, ...turns.slice(start)], dropped: turns.slice(0, start), ids };
}
