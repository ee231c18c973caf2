"""The threads of drafter and understudy: the order of their jobs, and their results."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from edge_runtime.answer.inbox import Compared, Failed, InboxEvent, UnderstudyFailed, Written
from edge_runtime.answer.jobs import DrafterJobs, UnderstudyJobs
from edge_runtime.answer.stats import StatsRecorder
from edge_runtime.answer.threads import DrafterThread, UnderstudyThread
from edge_runtime.session.actions import Compare, WriteToken
from edge_runtime.session.policy import Policy
from edge_runtime.session.states import Writer
from outrider_core.drafting.drafter import Draft, Drafter
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.understudy import Understudy
from tests.edge_runtime.world import PROMPT, World
from tests.waiting import HANG


class Slow(Understudy):
    """Loads when it is let."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"), "", 64, 5, lambda ids: "")
        self.loading, self.let, self.in_memory = threading.Event(), threading.Event(), False

    def load(self) -> None:
        self.loading.set()
        assert self.let.wait(HANG)
        self.in_memory = True

    @property
    def loaded(self) -> bool:
        return self.in_memory

    def unload(self) -> None:
        super().unload()
        self.in_memory = False


@pytest.mark.parametrize("closes", [False, True])
def test_an_understudy_that_is_still_loading_gives_its_memory_back_too(closes: bool) -> None:
    understudy = Slow()
    thread = UnderstudyThread(understudy)
    thread.submit(understudy.load)
    assert understudy.loading.wait(HANG)
    if closes:
        threading.Timer(0.05, understudy.let.set).start()
        thread.close()
    else:
        thread.unload()
        understudy.let.set()
        done = threading.Event()
        thread.submit(done.set)
        assert done.wait(HANG)
    assert not understudy.loaded
    thread.close()
    thread.unload()  # of an answer whose iterator was left


class Reader(Slow):
    """Reads until that is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.given_up = threading.Event(), threading.Event()

    def read(self, text: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> bool:
        self.begun.set()
        for _ in range(1000):
            if cancelled():
                self.given_up.set()
                return False
            threading.Event().wait(0.005)
        return True


def test_closing_ends_a_reading_whose_answer_was_left() -> None:
    reader = Reader()

    async def run() -> None:
        session = World(random.Random(0), policy=Policy(understudy="warm"), understudy=True).session
        thread = UnderstudyThread(reader)
        (reading,) = session.offline.read_along(PROMPT)
        UnderstudyJobs(session, thread, asyncio.Queue()).read(reading)
        await asyncio.to_thread(reader.begun.wait, 10)
        thread.close()

    asyncio.run(run())
    assert reader.given_up.is_set()


@pytest.mark.parametrize("end", ["cancelled", "the target is back", "closed"])
def test_what_is_read_for_a_token_is_given_up_with_the_token(end: str) -> None:
    reader, inbox = Reader(), asyncio.Queue[InboxEvent]()

    async def run() -> None:
        session = World(random.Random(0), understudy=True).session
        thread = UnderstudyThread(reader)
        UnderstudyJobs(session, thread, inbox).write(WriteToken(PROMPT, session.job.version, Writer.UNDERSTUDY))
        await asyncio.to_thread(reader.begun.wait, 10)
        if end == "cancelled":
            session.cancel()
        elif end == "closed":
            await asyncio.to_thread(thread.close)
        else:
            session.job.cancel()
        event = await asyncio.wait_for(inbox.get(), HANG)
        assert isinstance(event, Written) and reader.given_up.is_set()
        thread.close()

    asyncio.run(run())


class Grower:
    """A drafter whose tree grows until it is stopped, five seconds at most."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def draft(
        self, prefix: list[int], sampling: object, shape: object, stop: Callable[[], bool], rules: object
    ) -> Draft:
        self.begun.set()
        for _ in range(1000):
            if stop():
                break
            threading.Event().wait(0.005)
        return Draft(TokenTree.chain([5]), (-0.1,), 1)


def test_a_tree_for_comparison_ends_when_the_target_falls_silent() -> None:
    """The drafter may have to write then; and of half a tree nothing is learnt."""
    drafter, inbox = Grower(), asyncio.Queue[InboxEvent]()

    async def run() -> None:
        session = World(random.Random(0)).session
        thread = DrafterThread(cast(Drafter, drafter))
        DrafterJobs(session, thread, inbox, StatsRecorder(None)).compare(Compare(list(PROMPT), 8, 3))
        await asyncio.to_thread(drafter.begun.wait, 10)
        session._go_offline(0.0, 0.0)
        event = await asyncio.wait_for(inbox.get(), HANG)
        assert isinstance(event, Compared) and not event.draft.tree
        session.tree_compared(event.draft, event.base, event.working)
        session.tuning.committed([*PROMPT, 9])
        assert session.tuning.controller.tree.trees == 0
        thread.close()

    asyncio.run(run())


class Panic(BaseException):
    """As pyo3 raises where Rust panics, such as llguidance's."""


class Panicking(Understudy):
    def __init__(self) -> None:
        super().__init__(Path("nowhere"), "", 64, 5, lambda ids: "")

    def load(self) -> None:
        raise Panic("out of order")

    def read(self, text: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> bool:
        raise Panic("out of order")


def panics(*_: object) -> None:
    raise Panic("out of order")


def test_a_panic_in_a_writers_thread_reaches_the_answer_that_waits_for_it() -> None:
    drafter = type("Drafter", (), {"next_token": panics})()

    async def run() -> None:
        session, inbox = World(random.Random(0)).session, asyncio.Queue[InboxEvent]()
        thread = DrafterThread(cast(Drafter, drafter))
        DrafterJobs(session, thread, inbox, StatsRecorder(None)).write(
            WriteToken(PROMPT, session.job.version, Writer.DRAFTER)
        )
        event = await asyncio.wait_for(inbox.get(), 20)
        assert isinstance(event, Failed) and "Panic: out of order" in str(event.error)
        thread.close()

        understudy = UnderstudyThread(Panicking())
        UnderstudyJobs(session, understudy, inbox).write(WriteToken(PROMPT, session.job.version, Writer.UNDERSTUDY))
        failed = await asyncio.wait_for(inbox.get(), 20)
        assert isinstance(failed, UnderstudyFailed) and failed.why == "out of order"
        understudy.close()

    asyncio.run(run())
