"""A developer's first mistakes get an error at once, in one line that says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.blocking import BlockingRuntime
from edge_runtime.events import Event, Finished, LinkState, Verified
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.timeouts import Patience
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, PATIENCE, answer, make_verifier, oracle

PROMPT = [20, 21, 22]
Folders = tuple[Path, Path, Path]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": -2}, "seed"), ({"temperature": -1}, "temperature"), ({"top_p": 7}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"), ({"stop": [1]}, "stop"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_the_call_itself(bundle: Bundle, options: dict[str, Any], text: str) -> None:
    async def run() -> None:
        async with EdgeRuntime(bundle, None, RuntimeOptions(threads=1)) as runtime:
            with pytest.raises(ValueError, match=text):
                runtime.generate(PROMPT, **options)
            with pytest.raises(ValueError, match="token ids of the prompt"):
                runtime.generate([5, bundle.manifest.vocab_size])

    asyncio.run(run())


def test_a_second_answer_at_once_is_refused_and_the_first_goes_on(folders: Folders, bundle: Bundle) -> None:
    async def run(address: str) -> Finished:
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE, threads=1)) as runtime:
            events = runtime.generate(PROMPT, max_new_tokens=MAX_NEW)
            await anext(events)
            with pytest.raises(RuntimeError, match="already on its way"):
                await anext(runtime.generate(PROMPT))
            async for event in events:
                last = event
            assert isinstance(last, Finished)
            return last

    with serve(make_verifier(folders)) as address:
        assert asyncio.run(run(address)).token_ids == oracle(folders, PROMPT, Sampling())


def test_an_iterator_that_was_left_is_no_answer_on_its_way(folders: Folders, bundle: Bundle) -> None:
    async def run(address: str) -> list[int]:
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE, threads=1)) as runtime:
            async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW):
                if isinstance(event, Verified):
                    break
            return (await answer(runtime, PROMPT, Sampling()))[1]

    with serve(make_verifier(folders)) as address:
        assert asyncio.run(run(address)) == oracle(folders, PROMPT, Sampling())


def test_a_runtime_that_is_not_entered_says_so_at_once(bundle: Bundle) -> None:
    async def run() -> None:
        runtime = EdgeRuntime(bundle, "127.0.0.1:1", RuntimeOptions(threads=1))
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="async with EdgeRuntime"):
            await anext(runtime.generate(PROMPT))
        assert time.monotonic() - began < 1
        async with runtime:
            pass
        with pytest.raises(RuntimeError, match="closed"):
            await anext(runtime.generate(PROMPT))

    asyncio.run(run())


def test_a_blocking_runtime_that_is_not_entered_says_so_at_once(bundle: Bundle) -> None:
    runtime = BlockingRuntime(EdgeRuntime(bundle, None, RuntimeOptions(threads=1)))
    with contextlib.closing(runtime), pytest.raises(RuntimeError, match="with BlockingRuntime"):
        next(iter(runtime.generate(PROMPT)))


@pytest.mark.parametrize("writer", ["prefer-cloud", "cloud-only"])
def test_an_answer_without_a_verifier_says_why_there_is_none(bundle: Bundle, writer: Any) -> None:
    async def run() -> list[Event]:
        patience = Patience(connect=0.3, offline=0.6)
        policy = Policy(writer=writer, offline_rate=100.0)
        async with EdgeRuntime(
            bundle, "127.0.0.1:1", RuntimeOptions(policy=policy, patience=patience, threads=1)
        ) as runtime:
            events = [event async for event in runtime.generate(PROMPT, max_new_tokens=8)]
            assert runtime.link_error == "Connection refused"
            return events

    *events, last = asyncio.run(run())
    assert isinstance(last, Finished) and last.detail == "Connection refused" and not last.verified
    states = [(event.state, event.detail) for event in events if isinstance(event, LinkState)]
    assert states[0][0] == "connecting" and states[0][1].startswith("ws://127.0.0.1:1")
    silent = "waiting" if writer == "cloud-only" else "alone"
    assert (silent, "the verifier is silent: Connection refused") in states


def test_a_name_that_has_no_address_is_the_reason(bundle: Bundle) -> None:
    async def run() -> str:
        patience = Patience(connect=0.3, offline=2.0)
        policy = Policy(writer="cloud-only")
        async with EdgeRuntime(
            bundle, "nowhere.invalid:80", RuntimeOptions(policy=policy, patience=patience, threads=1)
        ) as runtime:
            *_, last = [event async for event in runtime.generate(PROMPT, max_new_tokens=8)]
            assert isinstance(last, Finished)
            return last.detail

    assert "Errno" not in (detail := asyncio.run(run())) and detail
