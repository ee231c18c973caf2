/** Fits a conversation into the context: the oldest turns are dropped, instructions stay. */

import type { ChatMessage } from "./bundle/chatBoundary.js";

/** Tokens kept free for an answer without a limit. */
const USUAL_ROOM = 256;
/** Tokens that suffice for an answer without a limit: while this many are left, no turn is dropped. */
const LEAST_ROOM = 64;

/** Roles that instruct the model and are never dropped from a conversation's beginning. */
const INSTRUCTIONS = ["system", "developer"];

/** messages: the part that fits, instructions first; dropped: messages left out, oldest first; ids: as tokens. */
export interface FittedMessages<Message extends ChatMessage = ChatMessage> {
  messages: Message[];
  dropped: Message[];
  ids: number[];
}

/**
 * Drop whole turns (a user's message and what follows it) from the beginning until the rest fits.
 *
 * encode: renders a conversation as token ids. maxContext: tokens of prompt and answer together. reserve: tokens to keep
 * free for the answer, at most half of the context, given up before the last turn is. As many as the context has, or more,
 * means no limit: then nothing is dropped if LEAST_ROOM tokens are left. Throws RangeError if the last turn alone leaves no
 * token free, or if there is no message.
 */
export function fitMessages<Message extends ChatMessage>(
  messages: readonly Message[],
  encode: (messages: Message[]) => number[],
  maxContext: number,
  reserve: number,
): FittedMessages<Message> {
  if (!messages.length) throw new RangeError("there is no message to answer");
  const first = messages.findIndex(({ role }) => !INSTRUCTIONS.includes(role));
  const instructions = messages.slice(0, first < 0 ? messages.length : first);
  const turns = messages.slice(instructions.length);
  const starts = [0, ...turns.keys()].filter((at, index) => index === 0 || (at > 0 && turns[at].role === "user"));
  const takesAll = reserve >= maxContext;
  const keptFree = Math.min(takesAll ? USUAL_ROOM : reserve, maxContext >> 1);
  const least = takesAll ? Math.min(LEAST_ROOM, keptFree) : keptFree;
  const room = maxContext - Math.max(1, keptFree);
  const encoded = (start: number) => encode([...instructions, ...turns.slice(start)]);
  const whole = encoded(0);
  if (whole.length <= maxContext - Math.max(1, least)) return { messages: [...messages], dropped: [], ids: whole };
  // fewer turns are fewer tokens, so a binary search finds the first start that fits
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
