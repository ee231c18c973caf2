"""What a session does next: it asks the target, asks for a tree, or has something written alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_runtime.session.actions import Action, DraftAhead, DraftChain, DraftTree, Send
from edge_runtime.session.policy import Mode
from edge_runtime.session.states import Writer
from edge_runtime.session.writing import write
from outrider_core.drafting.drafter import Draft
from outrider_core.protocol.tree import TokenTree

if TYPE_CHECKING:
    from edge_runtime.session.session import Session


def work(session: Session, now: float) -> list[Action]:
    """Whatever can be done next."""
    if session.finished:
        return []
    idle = session.flight is None and session.deadlines.retry is None
    can_ask = session.linked and not session.refused and idle
    if can_ask and session.provisional:
        return [_verify_chain(session, now), *write(session, now)]
    if session.solo.writes_first:
        return write(session, now)
    if can_ask and session.mode is Mode.STREAM:
        committed = len(session.committed)
        return [session.requests.generate(committed, session.text.limit - committed, now)]
    if can_ask and session.ready is not None:
        asked = _verify_tree(session, session.ready, now)
        return [asked, *([] if session.busy else [DraftAhead(session.version)])]
    if can_ask and not session.requests.seq:
        return [_verify_tree(session, Draft(), now)]  # the first token waits for no tree: the prompt's step draws it
    if session.alone:
        written = write(session, now)
        if written or not can_ask:
            return written
    if session.busy or session.ready is not None or session.flight is not None or session.mode is not Mode.TREE:
        return []
    most = min(session.max_nodes, session.tree_budget)
    if chain := session.tuning.chain(most, session.text.room, session.handover.drafts):
        session.busy = Writer.UNDERSTUDY
        text = session.handover.read_to_draft(session.committed)
        return [DraftChain(text, session.version, chain), *session.tuning.beside_chain(session.committed)]
    session.busy = Writer.DRAFTER
    size = session.tuning.tree_size(min(session.max_nodes, session.tree_budget), session.text.room)
    return [DraftTree(list(session.committed), session.version, *size)]


def _verify_tree(session: Session, draft: Draft, now: float) -> Send:
    session.ready = None
    session.tuning.asked(now, draft.chain)
    tree = draft.tree.pruned(session.max_nodes, session.text.room)  # it may be older than the verifier's limits
    return session.requests.verify(tree, len(session.committed), now, draft.scores, chain=draft.chain)


def _verify_chain(session: Session, now: float) -> Send:
    """Catch up: have the provisional text verified."""
    levels = min(session.max_nodes, session.context - len(session.committed))
    chain = TokenTree.chain(session.provisional[: max(0, levels)])
    return session.requests.verify(chain, len(session.committed), now, catching_up=True)
