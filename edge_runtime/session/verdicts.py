"""What a verdict does to an answer: commit, confirm or roll back, measure, and choose how to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_runtime.session.actions import Action, Adopt, Resume
from edge_runtime.session.states import FinishReason
from outrider_core.protocol.wire import FINISH_NONE, Verdict

if TYPE_CHECKING:
    from edge_runtime.session.session import Session


def take_verdict(session: Session, verdict: Verdict, now: float) -> list[Action]:
    """The accepted path and the bonus token are the target's; see `edge_runtime.session.session` for the rule."""
    flight, text, base = session.flight, session.text, len(session.committed)
    if flight is None or verdict.seq != flight.seq or verdict.base_len != base:
        return []  # stale: its request was given up
    session.tuning.answered(flight, verdict, now, session.alone, session.stats)
    session.requests.answered(flight, verdict, now)
    session.complaint = ""
    session.tree_budget = verdict.tree_budget or session.tree_budget
    nodes = () if flight.tree is None else flight.tree.tokens
    fresh = text.within([nodes[node] for node in verdict.accepted if node < len(nodes)] + [verdict.bonus])
    session.stats.count(None if flight.tree is None else len(nodes), len(fresh), bool(text.provisional), flight.chain)
    same = text.agreeing(fresh)
    if session.policy.on_return == "keep" and same < min(len(fresh), len(text.provisional)):
        rows = _rows(session, verdict, base + same)
        actions = rows + _commit(session, fresh[:same]) + _resume(session) + session.open(now)
        return actions + _choose(session, now)
    actions = _rows(session, verdict, base + len(verdict.accepted)) + _commit(session, fresh) + _resume(session)
    if text.over or verdict.finish != FINISH_NONE:
        return actions + session.finish(FinishReason.STOP if text.ended else FinishReason.LENGTH)
    if session.policy.target_first and session.flight:  # a stream goes on
        drafts = session.handover.drafts
        actions += session.tuning.comparison(text.committed, session.stats.streamed, drafts)
    return actions + _choose(session, now) + session.work(now)


def _rows(session: Session, verdict: Verdict, end: int) -> list[Action]:
    """Those of its rows that lie before position `end`: a verdict's rows end with that of its last accepted token."""
    stop = len(session.committed) + len(verdict.accepted)
    start = stop - len(verdict.rows) // session.row_shape.nbytes
    return session.add_rows(start, verdict.rows, max(0, end - start))


def adopt(session: Session) -> list[Action]:
    """Provisional text becomes part of the answer as it is."""
    tokens = session.text.adopt()
    if not tokens:
        return []
    session.version += 1
    return [Adopt(tokens), *_resume(session)]


def _commit(session: Session, fresh: list[int]) -> list[Action]:
    session.version += 1
    session.ready = None
    actions = [*(session.arithmetic.pin() if fresh else []), *session.text.commit(fresh)]
    session.tuning.committed(session.committed)
    return [*actions, *session.handover.read_along(session.committed)]


def _resume(session: Session) -> list[Action]:
    if not session.alone:
        return []
    session.deadlines.give_up = None
    session.solo.target_is_back()
    session.handover.target_is_back()
    return [Resume()]


def _choose(session: Session, now: float) -> list[Action]:
    """Tree or stream from here on."""
    if session.finished or not session.policy.target_first:
        return []
    return session.set_mode(session.tuning.choose(session.handover.drafts), now)
