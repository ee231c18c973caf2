/** What a verdict does to an answer: commit, confirm or roll back, measure, and choose how to go on. */

import { FINISH_NONE, type Verdict } from "../protocol/messages.js";
import type { Action } from "./actions.js";
import { targetFirst } from "./policy.js";
import type { Session } from "./session.js";

/** The accepted path and the bonus token are the target's; `session.ts` has the rule. */
export function takeVerdict(session: Session, verdict: Verdict, now: number): Action[] {
  const { flight, text } = session;
  const base = session.committed.length;
  if (!flight || verdict.seq !== flight.seq || verdict.baseLen !== base) return []; // stale: its request was given up
  session.tuning.answered(flight, verdict, now, session.alone, session.stats);
  session.requests.answered(flight, verdict, now);
  session.complaint = "";
  session.treeBudget = verdict.treeBudget || session.treeBudget;
  const nodes = flight.tree?.tokens ?? [];
  const path = Array.from(verdict.accepted).filter(node => node < nodes.length);
  const fresh = text.within([...path.map(node => nodes[node]), verdict.bonus]);
  session.stats.count(flight.tree ? nodes.length : null, fresh.length, text.provisional.length > 0, flight.chain);
  const same = text.agreeing(fresh);
  if (session.policy.onReturn === "keep" && same < Math.min(fresh.length, text.provisional.length)) {
    const actions = rowsOf(session, verdict, base + same);
    actions.push(...commit(session, fresh.slice(0, same)), ...resume(session), ...session.open(now));
    return [...actions, ...choose(session, now)];
  }
  const actions = rowsOf(session, verdict, base + verdict.accepted.length);
  actions.push(...commit(session, fresh), ...resume(session));
  if (text.over || verdict.finish !== FINISH_NONE) {
    return [...actions, ...session.finish(text.ended ? "stop" : "length")];
  }
  if (targetFirst(session.policy) && session.flight) {
    const { drafts } = session.handover; // a stream goes on
    actions.push(...session.tuning.comparison(text.committed, session.stats.streamed, drafts));
  }
  actions.push(...choose(session, now));
  return [...actions, ...session.work(now)];
}

/** Those of its rows that lie before position `end`: a verdict's rows end with that of its last accepted token. */
function rowsOf(session: Session, verdict: Verdict, end: number): Action[] {
  const count = Math.floor(verdict.rows.length / session.setup.rowShape.bytes);
  const start = session.committed.length + verdict.accepted.length - count;
  return session.addRows(start, verdict.rows, Math.max(0, end - start));
}

/** Provisional text becomes part of the answer as it is. */
export function adopt(session: Session): Action[] {
  const tokens = session.text.adopt();
  if (!tokens.length) return [];
  session.version++;
  return [{ type: "Adopt", tokens }, ...resume(session)];
}

function commit(session: Session, fresh: number[]): Action[] {
  session.version++;
  session.ready = null;
  const actions = [...(fresh.length ? session.arithmetic.pin() : []), ...session.text.commit(fresh)];
  session.tuning.committed(session.committed);
  return [...actions, ...session.handover.readAlong(session.committed)];
}

function resume(session: Session): Action[] {
  if (!session.alone) return [];
  session.deadlines.giveUp = null;
  session.solo.targetIsBack();
  session.handover.targetIsBack();
  return [{ type: "Resume" }];
}

/** Tree or stream from here on. */
function choose(session: Session, now: number): Action[] {
  if (session.finished || !targetFirst(session.policy)) return [];
  return session.setMode(session.tuning.choose(session.handover.drafts), now);
}
