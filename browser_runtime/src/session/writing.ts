/** Writing without the target: the drafter at once, the understudy once it has read the text. */

import type { Action } from "./actions.js";
import type { Session } from "./session.js";
import type { PauseReason } from "./states.js";

/** Ask for one more provisional token, where one may be written and the answer is not full. */
export function write(session: Session, now: number): Action[] {
  const { solo, handover, alone } = session;
  if (!solo.mayWrite(session.provisional.length) || session.text.full) return alone ? wait(session, now) : [];
  const text = [...session.committed, ...session.provisional];
  if (alone && !session.provisional.length) handover.begin(text);
  const actions: Action[] = [];
  // the drafter's first token comes before the work of loading and reading
  const begun = session.provisional.length > 0 || session.policy.writer === "device-only";
  if (alone && handover.reading === "idle" && begun) actions.push(handover.read(text, session.committed.length));
  if (session.busy) return actions;
  const writer = handover.nextWriter;
  if (alone && writer === "drafter") {
    const enough = solo.drafterIsDone || session.policy.writer === "device-only" || handover.holds;
    if (handover.coming && enough) return actions;
    if (solo.drafterIsDone) return [pause(session, "limit"), ...wait(session, now)];
  }
  if (writer !== handover.writer) {
    handover.writer = writer;
    solo.handedOver();
    actions.push({ type: "HandOver", writer, why: "" });
  }
  session.busy = writer;
  return [...actions, { type: "WriteToken", prefix: text, version: session.version, writer }];
}

/** The token that was asked for has come; it may not be wanted any more. */
export function takeToken(session: Session, token: number, confidence: number, version: number): Action[] {
  const writer = session.busy ?? "drafter";
  session.busy = null;
  if (version !== session.version || session.finished || !session.solo.mayWrite(session.provisional.length)) return [];
  session.text.provide(token, writer);
  session.version++;
  session.solo.wrote(token, confidence, writer);
  const provided: Action = { type: "Provide", token, writer };
  // a better writer that is on its way may be surer
  return session.solo.doubts && !session.handover.coming ? [provided, pause(session, "unsure")] : [provided];
}

/**
 * The understudy has read the text, or gave that up (null). If the target is still silent, what it would not have
 * written is withdrawn. Where there is no such thing, it reads what the drafter wrote meanwhile; that one waits.
 */
export function takeReading(session: Session, agreed: number | null): Action[] {
  const { handover, committed } = session;
  const text = [...committed, ...session.provisional];
  if (session.finished) return [];
  if (agreed === null) {
    handover.gaveUp();
  } else if (handover.hasRead(text, session.alone) && session.alone) {
    const judged = Math.max(handover.base + agreed, committed.length);
    if (judged < text.length) {
      session.version++; // a token under way is not wanted any more
      if (judged >= handover.text.length) return [handover.read(text, judged, true)];
      return session.text.withdrawProvisional(judged - committed.length);
    }
  }
  return handover.readAlong(committed);
}

/** Write nothing more, until the target answers or somebody asks to go on. */
export function pause(session: Session, reason: PauseReason): Action {
  session.solo.paused = reason;
  session.stats.pauses++;
  session.version++; // a token under way is not wanted any more
  return { type: "Pause", reason };
}

/** Nothing more can be written alone: wait for the target, but not for ever. */
function wait(session: Session, now: number): Action[] {
  const { solo, deadlines } = session;
  deadlines.giveUp = deadlines.giveUp || now + (solo.paused ? session.patience.offline : session.returnWait);
  return session.policy.writer === "device-only" && solo.obeys && !solo.paused ? session.finish("unverified") : [];
}
