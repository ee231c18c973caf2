/** What a verifier's refusals do to an answer: it waits, asks anew, or goes on alone. No text is lost by them. */

import {
  ERR_BOUNDS,
  ERR_BUSY,
  ERR_GOING_AWAY,
  ERR_MALFORMED,
  ERR_TOO_LONG,
  ERR_UNKNOWN,
  type WireErrorMessage,
} from "../protocol/messages.js";
import type { Action } from "./actions.js";
import type { Session } from "./session.js";
import type { FinishReason } from "./states.js";

/** Seconds that an answer waits at its end for a verifier that accepts it, where the last one dialled did not. */
export const REFUSED_SECONDS = 10;
/** Seconds until OPEN is sent again where the verifier names no time. */
const RETRY_SECONDS = 1;
const SHORTEST_RETRY = 0.05;

/** The verifier refused what it was asked last, or says that it ends. */
export function takeError(session: Session, error: WireErrorMessage, now: number): Action[] {
  // what is under way is still answered; then the link goes down and comes up elsewhere
  if (error.code === ERR_GOING_AWAY && error.stream === -1) return [];
  if (error.code === ERR_UNKNOWN) return askAnew(session, now);
  if (error.code === ERR_TOO_LONG) return session.finish(noRoom(session));
  session.complaint = error.text;
  session.requests.flight = null;
  session.deadlines.retry = null;
  if (error.code === ERR_MALFORMED || error.code === ERR_BOUNDS) {
    session.refused = true; // so it would be refused again
    expectReturn(session, 0, now);
  } else {
    const advised = error.code === ERR_BUSY || error.code === ERR_GOING_AWAY;
    const wait = advised ? Math.max(SHORTEST_RETRY, error.retryAfterMs / 1000) : RETRY_SECONDS;
    session.deadlines.retry = now + wait;
  }
  return session.goOnAlone(now, now);
}

/** The verifier knows another text, or none: OPEN. Not at once where that has just been of no help. */
export function askAnew(session: Session, now: number): Action[] {
  if (!session.flight) return []; // what it says so of was given up: the OPEN before it was refused
  if (!session.flight.afterOpen) return session.open(now);
  session.requests.flight = null;
  session.deadlines.retry = now + RETRY_SECONDS;
  return session.goOnAlone(now, now);
}

/** This link's verifier does not know the answer's constraint, and would pass over it: it is not asked. */
export function disobeyed(session: Session, now: number): Action[] {
  session.refused = true;
  session.requests.flight = null;
  session.deadlines.connect = session.deadlines.retry = null;
  session.complaint = "this verifier cannot obey the answer's constraint; update it, or ask without one";
  expectReturn(session, 0, now);
  return session.goOnAlone(now, now);
}

/** Where nothing more can be written, wait no longer than `seconds` for the target. */
export function expectReturn(session: Session, seconds: number, now: number): void {
  session.returnWait = seconds;
  const { deadlines } = session;
  if (deadlines.giveUp !== null && !session.solo.paused) deadlines.giveUp = Math.min(deadlines.giveUp, now + seconds);
}

/** The verifier's context is full: what was written alone stays as it is. */
export function noRoom(session: Session): FinishReason {
  session.complaint = `the verifier's context holds ${session.context} tokens; this conversation needs more`;
  return session.provisional.length ? "unverified" : "length";
}
