"""The threads of drafter and understudy: what is asked of them in which order, and what they give back."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edge_runtime.actions import WriteToken
from edge_runtime.inbox import InboxEvent, Written
from edge_runtime.jobs import UnderstudyJobs
from edge_runtime.policy import Policy
from edge_runtime.states import Writer
from edge_runtime.worker import UnderstudyThread
from outrider_core.targets.understudy import Understudy
from tests.edge_runtime.world import PROMPT, World


class Slow(Understudy):
    """Loads when it is let."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"), "", 64, 5, lambda ids: "")
        self.loading, self.let, self.in_memory = threading.Event(), threading.Event(), False

    def load(self) -> None:
        self.loading.set()
        assert self.let.wait(10)
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
    assert understudy.loading.wait(10)
    if closes:
        threading.Timer(0.05, understudy.let.set).start()
        thread.close()
    else:
        thread.unload()
        understudy.let.set()
        done = threading.Event()
        thread.submit(done.set)
        assert done.wait(10)
    assert not understudy.loaded
    thread.close()
    thread.unload()  # of an answer whose iterator was left


class Reader(Slow):
    """Reads until it is not wanted any more."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.given_up = threading.Event(), threading.Event()

    def read(self, text: Sequence[int], wanted: Callable[[], bool] = lambda: True) -> bool:
        self.begun.set()
        for _ in range(1000):
            if not wanted():
                self.given_up.set()
                return False
            threading.Event().wait(0.005)
        return True


def test_closing_ends_a_reading_whose_answer_was_left() -> None:
    reader = Reader()

    async def run() -> None:
        session = World(random.Random(0), policy=Policy(understudy="warm"), understudy=True).session
        thread = UnderstudyThread(reader)
        UnderstudyJobs(session, thread, asyncio.Queue()).read(session.handover.read(PROMPT, len(PROMPT)))
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
        UnderstudyJobs(session, thread, inbox).write(WriteToken(PROMPT, session.version, Writer.UNDERSTUDY))
        await asyncio.to_thread(reader.begun.wait, 10)
        if end == "cancelled":
            session.cancel()
        elif end == "closed":
            await asyncio.to_thread(thread.close)
        else:
            session.version += 1
        event = await asyncio.wait_for(inbox.get(), 2)
        assert isinstance(event, Written) and reader.given_up.is_set()
        thread.close()

    asyncio.run(run())
