"""Drives one session to its end: link, drafter and clock in, events out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

from edge_runtime.actions import (
    Action,
    AddRows,
    Adopt,
    Commit,
    Done,
    DraftAhead,
    DraftTree,
    Pause,
    Provide,
    Reconnect,
    Resume,
    RollBack,
    Send,
    Stall,
    WriteToken,
)
from edge_runtime.answer_text import AnswerText
from edge_runtime.events import (
    Adopted,
    AnswerStats,
    Event,
    Finished,
    LinkState,
    Provisional,
    RolledBack,
    Verified,
)
from edge_runtime.link import Arrived, LinkDown, LinkRefused, LinkUp
from edge_runtime.news import Drafted, News, Shadow
from edge_runtime.pace import Controller
from edge_runtime.session import Session
from edge_runtime.transport import Transport
from edge_runtime.worker import DrafterFailed, DrafterThread
from outrider_core.drafting.drafter import Draft, TreeShape
from outrider_core.protocol.tree import MAX_NODES, TokenTree
from outrider_core.protocol.wire import Verdict, Verify


class Answer:
    """One answer on its way. `inbox` gets link events and finished drafter jobs, in this loop's thread."""

    def __init__(
        self, session: Session, link: Transport | None, worker: DrafterThread,
        inbox: asyncio.Queue[News], shape: TreeShape, decode: Callable[[list[int]], str],
        stops: Sequence[str], ahead: bool | None, controller: Controller, shaping: bool,
    ) -> None:  # fmt: skip
        self.session, self.link, self.worker, self.inbox = session, link, worker, inbox
        self.shape, self.stops, self.ahead, self.shaping = shape, stops, ahead, shaping
        self.controller, self.pace = controller, controller.pace
        self.loop = asyncio.get_running_loop()
        worker.failed = self._drafter_failed
        self.stats = AnswerStats()
        self.text = AnswerText(decode, stops)
        self.pending: list[Event] = []
        self.stalled_at: float | None = None
        self.scores: tuple[float, ...] = ()  # of the tree that is ready or in flight
        self.verdict_at = 0.0
        self.shadow: Shadow | None = None
        self.held: WriteToken | None = None  # until `write_at`
        self.write_at = 0.0
        self.tree_round = False
        self.state = ""
        self.began = time.monotonic()

    async def run(self) -> AsyncIterator[Event]:
        session, link = self.session, self.link
        up, down = (link.traffic.up, link.traffic.down) if link else (0, 0)
        self.text.commit(session.committed[len(session.prompt) :])
        self.text.rebase(session.provisional)
        self._state("connecting", link.url if link else "no server given")
        while not self.inbox.empty():  # what happened between two answers shows in the link's state
            if isinstance(news := self.inbox.get_nowait(), LinkUp):
                self.pace.linked(news.welcome, news.rtt)
        if link and link.refused:
            raise link.refused
        if self._chooses:
            session.mode = self.controller.begin()
        await self._do(session.start(self._now()))
        if link and link.welcome:
            await self._do(session.link_up(link.welcome, self._now()))
        while True:
            for event in self.pending:
                if isinstance(event, Finished):
                    self._finish_stats(up, down)
                yield event
            self.pending.clear()
            if session.finished:
                return
            await self._next_event()

    async def close(self) -> None:
        """Cancel what is not finished."""
        if not self.session.finished:
            await self._do(self.session.cancel(self._now()))

    async def pause(self) -> None:
        await self._do(self.session.pause(self._now()))

    async def proceed(self) -> None:
        await self._do(self.session.proceed(self._now()))

    def _now(self) -> float:
        return time.monotonic()

    async def _next_event(self) -> None:
        """Wait for the link, the drafter or the clock, whichever is first, and feed the session."""
        wake = min((t for t in (self.session.wake_at(), self.held and self.write_at) if t), default=math.inf)
        timeout = None if math.isinf(wake) else max(0.0, wake - self._now())
        event = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                event = await self.inbox.get()
        if event is not None:
            await self._feed(event)
        await self._do(self.session.tick(self._now()))
        await self._release()

    async def _feed(self, event: object) -> None:
        session, now = self.session, self._now()
        match event:
            case Drafted(session=owner) | Shadow(session=owner) if owner is not session:
                pass  # asked for by an answer that was cancelled
            case Shadow():
                self.shadow = event
            case Drafted(result=Draft() as draft, version=version):
                await self._do(session.tree_ready(self._shaped(draft, event), version, now))
            case Drafted(result=(token, confidence), version=version):
                self._count_drafting(event)
                await self._do(session.token_written(token, confidence, version, now))
            case LinkUp(welcome=welcome, rtt=rtt):
                self.pace.linked(welcome, rtt)
                if self._chooses:
                    await self._do(session.set_mode(self.controller.begin(), now))
                await self._do(session.link_up(welcome, now))
            case LinkDown(reason=reason):
                self._state("connecting" if session.connect_by else self.state, reason)
                await self._do(session.link_down(now))
            case Arrived(message=message):
                if getattr(message, "stream", session.stream) in (session.stream, -1):
                    if isinstance(message, Verdict):
                        self._measure(message, now)
                    await self._do(session.message(message, now))
                    if isinstance(message, Verdict) and self._chooses and not session.finished:
                        await self._do(session.set_mode(self.controller.choose(), now))
            case LinkRefused() | DrafterFailed() as error:
                raise error

    def _drafter_failed(self, error: Exception) -> None:
        failure = DrafterFailed(f"the drafter's engine failed: {error}")
        failure.__cause__ = error
        self.loop.call_soon_threadsafe(self.inbox.put_nowait, failure)

    @property
    def _chooses(self) -> bool:
        """Whether trees and streams are alternatives here."""
        return self.session.policy.writer in ("prefer-cloud", "cloud-only")

    def _shaped(self, draft: Draft, job: Drafted) -> TokenTree:
        """What of a draft is sent."""
        self._count_drafting(job)
        self.pace.drafted(job.working, draft.steps, self.session.stats.rounds > 0 and not draft.ahead)
        if self.session.stats.rounds:
            self.stats.ahead_rounds += 1
            self.stats.ahead_hits += draft.ahead
            self.stats.ahead_used += draft.kept
        tree = self._worth_sending(draft)
        self.scores = draft.scores[: len(tree)]
        return tree

    def _count_drafting(self, job: Drafted) -> None:
        self.stats.first_draft_seconds = self.stats.first_draft_seconds or job.seconds
        self.stats.draft_seconds += job.seconds

    def _worth_sending(self, draft: Draft) -> TokenTree:
        count = self.pace.worth_sending(draft.tree, draft.scores) if self.shaping else len(draft.tree)
        return draft.tree.pruned(count, MAX_NODES)

    def _measure(self, verdict: Verdict, now: float) -> None:
        flight = self.session.flight
        if flight is None or verdict.seq != flight.seq:
            return
        engine, queue = verdict.engine_us / 1e6, verdict.queue_us / 1e6
        if flight.tree is None:
            if flight.sent == self.verdict_at:  # not the first, which had to be asked for
                self.pace.streamed(now - self.verdict_at, engine, self.session.alone)
        elif self.tree_round and not flight.after_open:
            self.stats.wait_seconds += now - flight.sent
            self.stats.engine_seconds += engine
            if not self.session.alone:  # an outage says nothing of the link
                self.pace.verified(flight.tree, self.scores, verdict.accepted, now - flight.sent, engine, queue)
        self.verdict_at = now

    async def _do(self, actions: list[Action]) -> None:
        session, text = self.session, self.text
        for action in actions:
            match action:
                case Send(message=message):
                    self.tree_round = not session.provisional
                    if isinstance(message, Verify) and self.tree_round and self.verdict_at:
                        self.pace.waited(self._now() - self.verdict_at)
                    if self.link:
                        await self.link.send(message)
                case DraftTree():
                    self._draft(action)
                case WriteToken():
                    self.held = action
                    await self._release()
                case DraftAhead():
                    self._draft_ahead()
                case AddRows(positions=positions, rows=rows):
                    self.worker.submit(partial(self.worker.drafter.add_rows, positions, rows))
                    self._draft_ahead()
                case Commit(tokens=tokens, confirmed=confirmed):
                    if not self.stats.first_token_seconds:
                        self.stats.first_token_seconds = self._now() - self.began
                    self._compare()
                    count = text.commit(tokens)
                    text.rebase(session.provisional)
                    self.pending.append(Verified(*self._shown(), tokens[:count], confirmed))
                    self._state("verified", "")
                    if count is not None:
                        return await self._do(session.stop(len(tokens) - count, self._now()))
                case Provide(token=token):
                    if self.stalled_at is not None:
                        self.stats.stall_seconds.append(self._now() - self.stalled_at)
                        self.stalled_at = None
                    if not text.provide(token):
                        session.enough()
                    self.pending.append(Provisional(*self._shown(), token))
                case RollBack(tokens=tokens):
                    text.rebase(session.provisional)
                    self.pending.append(RolledBack(*self._shown(), len(tokens)))
                case Adopt(tokens=tokens):
                    count = text.commit(tokens)
                    text.rebase(session.provisional)
                    if count is not None and count < len(tokens):
                        self.pending.append(RolledBack(*self._shown(), len(tokens) - count))
                    self.pending.append(Adopted(*self._shown(), tokens[:count]))
                    if count is not None:
                        return await self._do(session.stop(len(tokens) - count, self._now()))
                case Stall(deadline=deadline):
                    self.stalled_at = deadline
                    silent = session.policy.writer == "cloud-only" or bool(session.paused)
                    self._state("waiting" if silent else "alone", "the verifier is silent")
                case Pause(reason=reason):
                    self._state("waiting", f"paused: {reason}")
                case Resume():
                    self.stalled_at = None
                    self._state("verified", "")
                case Reconnect():
                    if self.link:
                        self.link.renew()
                case Done(reason=reason):
                    text.end()
                    self.pending.append(Finished(*self._shown(), reason, session.text_ids, self.stats))

    def _state(self, state: str, detail: str) -> None:
        if state != self.state:
            self.state = state
            self.pending.append(LinkState(*self._shown(), state, detail))

    def _shown(self) -> tuple[str, str]:
        """(verified, provisional) text."""
        return self.text.verified, self.text.provisional

    async def _release(self) -> None:
        """Write the next token alone once its time has come, or not at all."""
        held, session, now = self.held, self.session, self._now()
        if held is None:
            return
        paced = session.alone and session.policy.writer != "device-only"  # it may be taken back
        if held.version != session.version:
            self.held = None
            await self._do(session.token_written(0, 0.0, held.version, now))
        elif not paced or now >= self.write_at:
            self.held, self.write_at = None, now + 1 / session.policy.offline_rate
            self._draft(held)

    def _draft(self, action: DraftTree | WriteToken) -> None:
        session, drafter, asked = self.session, self.worker.drafter, time.monotonic()

        def work() -> None:
            result: Draft | tuple[int, float]
            began = time.monotonic()
            if isinstance(action, WriteToken):
                result = drafter.next_token(action.prefix, session.sampling)
            elif action.depth < 1:
                result = Draft()
            else:
                result = drafter.draft(
                    action.prefix, session.sampling, self._shape(action.nodes, action.depth),
                    lambda: session.version != action.version,
                )  # fmt: skip
            now = time.monotonic()
            drafted = Drafted(session, result, action.version, now - asked, now - began)
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, drafted)

        self.worker.submit(work)

    def _shape(self, nodes: int, depth: int) -> TreeShape:
        """Of the next tree; nodes, depth: what the session has room for."""
        shape = replace(self.shape, nodes=min(self.shape.nodes, nodes), depth=min(self.shape.depth, depth))
        if not self.shaping:
            return shape
        return replace(shape, nodes=min(shape.nodes, self.pace.worth_drafting()), gain=self.pace.gain())

    def _compare(self) -> None:
        """Beside a stream, now and then draft a tree and see how much of it comes true: so that tau stays known."""
        session = self.session
        if self.shadow:
            draft = self.shadow.draft
            tree = self._worth_sending(draft)
            if (path := self.shadow.foreseen(tree, session.committed)) is not None:
                self.pace.foreseen(tree, draft.scores[: len(tree)], path, self.shadow.working)
                self.shadow = None
        streaming = session.flight is not None and session.flight.tree is None
        streamed = session.stats.streamed
        if not streaming or not self._chooses or streamed % self.pace.compare_every(streamed):
            return
        prefix, drafter, shape = list(session.committed), self.worker.drafter, self._shape(MAX_NODES, self.shape.depth)

        def work() -> None:
            began = time.monotonic()
            draft = drafter.draft(prefix, session.sampling, shape)
            took = time.monotonic() - began
            shadow = Shadow(session, draft, len(prefix), took)
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, shadow)

        self.worker.submit(work)

    def _draft_ahead(self) -> None:
        """Draft on below the tree in flight, where there is one and nothing else to do."""
        session, version = self.session, self.session.version
        if session.flight is None or not session.flight.tree or session.provisional or session.busy:
            return
        if not (self.pace.drafts_ahead() if self.ahead is None else self.ahead):
            return
        shape = self.shape

        def done(nodes: int, seconds: float) -> None:
            self.stats.ahead_nodes += nodes
            self.stats.ahead_seconds += seconds

        self.worker.draft_ahead(shape, lambda: session.version == version, done)

    def _finish_stats(self, up: int, down: int) -> None:
        session, stats = self.session, self.stats
        for name in ("rounds", "nodes", "calls", "streamed", "provisional", "kept", "rolled_back", "adopted", "stalls",
                     "pauses", "opens"):  # fmt: skip
            setattr(stats, name, getattr(session.stats, name))
        stats.tokens = len(session.committed) - len(session.prompt) - stats.adopted
        stats.tau = (session.stats.accepted + stats.rounds) / stats.rounds if stats.rounds else 0.0
        stats.seconds = self._now() - self.began
        stats.tokens_per_second = stats.tokens / stats.seconds
        if self.link:
            stats.bytes_up = self.link.traffic.up - up
            stats.bytes_down = self.link.traffic.down - down
