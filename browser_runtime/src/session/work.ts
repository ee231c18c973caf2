/** What a session does next: it asks the target, asks for a tree, or has something written alone. */

import { type Draft, NO_DRAFT } from "../drafting/drafter.js";
import { TokenTree } from "../protocol/tree.js";
import type { Action, Send } from "./actions.js";
import type { Session } from "./session.js";
import { write } from "./writing.js";

/** Whatever can be done next. */
export function work(session: Session, now: number): Action[] {
  if (session.finished) return [];
  const idle = !session.flight && session.deadlines.retry === null;
  const canAsk = session.linked && !session.refused && idle;
  if (canAsk && session.provisional.length) return [verifyChain(session, now), ...write(session, now)];
  if (session.solo.writesFirst) return write(session, now);
  if (canAsk && session.mode === "stream") {
    const { limit, committed } = session.text;
    return [session.requests.generate(committed.length, limit - committed.length, now)];
  }
  if (canAsk && session.ready) {
    const asked = verifyTree(session, session.ready, now);
    return session.busy ? [asked] : [asked, { type: "DraftAhead", version: session.version }];
  }
  // the first token waits for no tree: the prompt's step draws it
  if (canAsk && !session.requests.seq) return [verifyTree(session, NO_DRAFT, now)];
  if (session.alone) {
    const written = write(session, now);
    if (written.length || !canAsk) return written;
  }
  if (session.busy || session.ready || session.flight || session.mode !== "tree") return [];
  const most = Math.min(session.maxNodes, session.treeBudget);
  const tokens = session.tuning.chain(most, session.text.room, session.handover.drafts);
  if (tokens) {
    const prefix = session.handover.readToDraft(session.committed);
    session.busy = "understudy";
    const draft: Action = { type: "DraftChain", prefix, version: session.version, tokens };
    return [draft, ...session.tuning.besideChain(session.committed)];
  }
  session.busy = "drafter";
  const size = session.tuning.treeSize(Math.min(session.maxNodes, session.treeBudget), session.text.room);
  return [{ type: "DraftTree", prefix: [...session.committed], version: session.version, ...size }];
}

function verifyTree(session: Session, draft: Draft, now: number): Send {
  session.ready = null;
  session.tuning.asked(now, draft.chain);
  const tree = draft.tree.pruned(session.maxNodes, session.text.room); // it may be older than the verifier's limits
  return session.requests.verify(tree, session.committed.length, now, draft.scores, false, draft.chain);
}

/** Catch up: have the provisional text verified. */
function verifyChain(session: Session, now: number): Send {
  const levels = Math.max(0, Math.min(session.maxNodes, session.context - session.committed.length));
  const chain = TokenTree.chain(session.provisional.slice(0, levels));
  return session.requests.verify(chain, session.committed.length, now, [], true);
}
