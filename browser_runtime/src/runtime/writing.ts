/** Writing without the target: the drafter at once, the understudy once it has read the text. */

import type { Action } from "./actions.js";
import type { Session } from "./session.js";
import type { PauseReason } from "./states.js";

/** Ask for one more provisional token, where one may be written and the answer is not full. */
export function write(session: Session, now: number): Action[] {
  const { solo, handover, alone } = session;
  if (!solo.mayWrite(session.provisional.length) || session.text.full) return alone ? wait(session, now) : [];
  const text = [...session.committed, ...session.provisional];
  const actions: Action[] = [];
  // the drafter's first token comes before the work of loading and reading
  const begun = session.provisional.length > 0 || session.policy.writer === "device-only";
  if (alone && handover.reading === "idle" && begun) actions.push(handover.read(text, session.committed.length));
  if (session.busy) return actions;
  const writer = handover.nextWriter;
  if (alone && writer === "drafter") {
    if (handover.coming && (solo.drafterIsDone || session.policy.writer === "device-only")) return actions;
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
  return session.solo.doubts ? [provided, pause(session, "unsure")] : [provided];
}

/** The understudy has read the text: what it would not have written is withdrawn, if the target is still silent. */
export function takeReading(session: Session, agreed: number): Action[] {
  const { handover } = session;
  const actions: Action[] = [];
  const read = handover.hasRead([...session.committed, ...session.provisional], session.alone);
  if (read && session.alone && !session.finished) {
    const keep = Math.max(0, handover.base + agreed - session.committed.length);
    if (session.provisional.length > keep) {
      session.version++; // a token under way is not wanted any more
      actions.push(...session.text.withdrawProvisional(keep));
    }
  }
  return [...actions, ...handover.readAlong(session.committed)];
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
  return session.policy.writer === "device-only" && !solo.paused ? session.finish("unverified") : [];
}
