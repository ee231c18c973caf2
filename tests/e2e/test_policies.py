"""Policies, modes, stop strings and records on the tiny stack: what an app can ask of an answer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links import EmulatedLink
from edge_runtime.answer.threads import DrafterFailed
from edge_runtime.events import Adopted, Event, Finished, LinkState, Provisional, Verified
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.timeouts import Patience
from outrider_core.drafting.bundle import Bundle
from outrider_core.drafting.engines import open_engine
from outrider_core.protocol.ending import COMPLETE
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, PATIENCE, Screen, answer, make_verifier, oracle
from tests.waiting import HANG

PROMPT = [20, 21, 22, 23]
Folders = tuple[Path, Path, Path]


def port(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


async def run_with(runtime: EdgeRuntime, **options: Any) -> tuple[Finished, Screen, list[Event]]:
    screen, events = Screen(), list[Event]()
    async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW, **options):
        screen.show(event)
        events.append(event)
    assert isinstance(event, Finished)
    return event, screen, events


@pytest.mark.parametrize("mode", ["prefer-cloud", "prefer-device", "cloud-only"])
def test_every_policy_with_a_link_ends_in_the_targets_text(folders: Folders, bundle: Bundle, mode: Any) -> None:
    async def run(address: str) -> tuple[Finished, Screen, list[Event]]:
        async with EdgeRuntime(
            bundle, address, RuntimeOptions(policy=Policy(writer=mode), patience=PATIENCE)
        ) as runtime:
            return await run_with(runtime, temperature=0.9, seed=4)

    with serve(make_verifier(folders)) as address:
        end, screen, events = asyncio.run(run(address))
    assert end.token_ids == screen.tokens == oracle(folders, PROMPT, Sampling(temperature=0.9, seed=4))
    written = [event for event in events if isinstance(event, Provisional)]
    assert bool(written) == (mode == "prefer-device")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_drafting_ahead_changes_no_token(folders: Folders, bundle: Bundle, sampling: Sampling) -> None:
    async def run(address: str) -> Finished:
        async with EdgeRuntime(
            bundle, address, RuntimeOptions(patience=PATIENCE), pinned=Pinned(mode="tree", ahead=True)
        ) as runtime:
            end, _, _ = await run_with(runtime, temperature=sampling.temperature, seed=sampling.seed)
            return end

    with serve(make_verifier(folders)) as address:
        end = asyncio.run(run(address))
    assert end.token_ids == oracle(folders, PROMPT, sampling)
    assert end.stats.ahead_nodes > 0 and end.stats.ahead_rounds > 0


def test_text_written_alone_does_not_run_away(folders: Folders, bundle: Bundle) -> None:
    """Eight tokens at a given rate, then the link is back; what is held back then does not hold the answer up."""
    rate, times = 25.0, list[float]()

    async def run(address: str) -> Finished:
        policy = Policy(offline_rate=rate)
        async with (
            EmulatedLink(port(address)) as link,
            EdgeRuntime(bundle, link.address, RuntimeOptions(policy=policy, patience=PATIENCE)) as runtime,
        ):
            async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW):
                if isinstance(event, Verified) and not link.cuts:
                    link.silent = True
                    link.cuts += 1
                if isinstance(event, Provisional) and len(times) < 8:
                    times.append(time.monotonic())
                    if len(times) == 8:
                        link.silent = False
                        link.cut()
            assert isinstance(event, Finished)
            return event

    truth = oracle(folders, PROMPT, Sampling())
    for _ in range(20):  # the first of them may be late, which shortens the time: on a busy machine by more than this
        times.clear()
        with serve(make_verifier(folders)) as address:
            end = asyncio.run(run(address))
        assert end.token_ids == truth and end.stats.rolled_back > 0
        if times[-1] - times[0] >= 7 / rate - 0.04:
            return
    raise AssertionError(times)


def test_nothing_holds_a_device_up_that_is_alone(folders: Folders, bundle: Bundle) -> None:
    async def run() -> Finished:
        policy = Policy(writer="device-only", offline_rate=1e-6)
        async with EdgeRuntime(bundle, None, RuntimeOptions(policy=policy)) as runtime:
            return (await run_with(runtime))[0]

    end = asyncio.run(run())
    assert end.reason in COMPLETE and end.stats.provisional == len(end.token_ids) > 1


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="offline_rate"):
        Policy(offline_rate=rate)


def test_a_streams_gap_is_without_the_round_trip(folders: Folders, bundle: Bundle) -> None:
    """What comes between two tokens is measured, not the wait for the first."""

    async def run(address: str) -> float:
        async with (
            EmulatedLink(port(address), delay=0.4) as link,
            EdgeRuntime(
                bundle, link.address, RuntimeOptions(patience=Patience()), pinned=Pinned(mode="stream")
            ) as runtime,
        ):
            await run_with(runtime)
            controller = runtime.controller
            return controller.stream.tokens and 1 / (controller.stream.rate(controller.costs) or 1e-9)

    with serve(make_verifier(folders)) as address:
        gap = asyncio.run(run(address))
    assert gap and gap < 0.4


def test_cloud_only_waits_through_an_outage(folders: Folders, bundle: Bundle) -> None:
    async def run(address: str) -> tuple[Finished, list[Event]]:
        async with (
            EmulatedLink(port(address)) as link,
            EdgeRuntime(
                bundle, link.address, RuntimeOptions(policy=Policy(writer="cloud-only"), patience=PATIENCE)
            ) as runtime,
        ):
            events: list[Event] = []
            async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW):
                events.append(event)
                if isinstance(event, Verified) and link.cuts == 0:
                    link.cut()
            assert isinstance(event, Finished)
            return event, events

    with serve(make_verifier(folders)) as address:
        end, events = asyncio.run(run(address))
    assert end.token_ids == oracle(folders, PROMPT, Sampling()) and end.stats.provisional == 0
    assert "waiting" in [event.state for event in events if isinstance(event, LinkState)]


def test_what_was_written_in_an_outage_can_be_kept(folders: Folders, bundle: Bundle) -> None:
    """`keep`: the adopted span stays, and behind it the target writes as behind any other text."""

    async def run(address: str) -> tuple[Finished, Screen, list[Event]]:
        async with (
            EmulatedLink(port(address)) as link,
            EdgeRuntime(
                bundle, link.address, RuntimeOptions(policy=Policy(on_return="keep"), patience=PATIENCE)
            ) as runtime,
        ):
            screen, events = Screen(), list[Event]()
            async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW):
                screen.show(event)
                events.append(event)
                if isinstance(event, Verified) and not link.cuts:
                    link.silent = True
                    link.cuts += 1
                if isinstance(event, Provisional) and len(screen.tokens) - screen.verified == 4:
                    link.silent = False
                    link.cut()
            assert isinstance(event, Finished)
            return event, screen, events

    with serve(make_verifier(folders)) as address:
        end, screen, events = asyncio.run(run(address))
    adopted = [event for event in events if isinstance(event, Adopted)]
    assert adopted and end.stats.adopted == sum(len(event.tokens) for event in adopted)
    assert end.token_ids == screen.tokens and end.stats.rolled_back == 0


def test_a_stop_string_ends_the_answer_wherever_the_rounds_end(folders: Folders, bundle: Bundle) -> None:
    decode = bundle.tokenizer.decode
    truth = oracle(folders, PROMPT, Sampling())
    whole = decode(truth, skip_special_tokens=True)
    stops = {whole[at : at + size] for at in range(2, len(whole) - 6, 5) for size in (1, 4)}

    async def run(address: str) -> None:
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE)) as runtime:
            for stop in sorted(stops):
                end, screen, _ = await run_with(runtime, stop=[stop])
                assert end.verified == whole[: whole.find(stop)] and end.provisional == ""
                assert end.reason == "stop" and end.token_ids == truth[: len(end.token_ids)]
                assert stop in decode(end.token_ids, skip_special_tokens=True)
                assert stop not in decode(end.token_ids[:-1], skip_special_tokens=True)
                assert screen.tokens == end.token_ids and end.stats.tokens == len(end.token_ids)

    with serve(make_verifier(folders)) as address:
        asyncio.run(run(address))


def test_an_answer_goes_on_in_another_process_from_its_record(folders: Folders, bundle: Bundle) -> None:
    """The first runtime is forgotten at some event, without a goodbye; a new one takes the record up."""
    sampling = Sampling(temperature=0.8, seed=9)
    truth = oracle(folders, PROMPT, sampling)

    async def run(address: str, after: int) -> Finished:
        first = EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE))
        await first.__aenter__()
        record = ""
        stream = first.generate(PROMPT, max_new_tokens=MAX_NEW, temperature=0.8, seed=9)
        async for _ in stream:
            record = json.dumps(first.record())
            if after == 0:
                break
            after -= 1
        assert first._link_task
        first._link_task.cancel()
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE)) as second:
            screen = Screen()
            screen.tokens = json.loads(record)["committed"]
            screen.verified = len(screen.tokens)
            async for event in second.resume(json.loads(record)):
                screen.show(event)
            assert isinstance(event, Finished) and screen.tokens == event.token_ids
            await stream.aclose()  # type: ignore[attr-defined]
            first._worker.close()
            return event

    with serve(make_verifier(folders)) as address:
        for after in (0, 2, 5):
            assert asyncio.run(run(address, after)).token_ids == truth


def test_a_record_that_is_none_is_refused(bundle: Bundle) -> None:
    async def run(record: dict[str, Any]) -> None:
        async with EdgeRuntime(bundle, None) as runtime:
            assert runtime.record() is None
            async for _ in runtime.resume(record):
                pass

    for record in ({}, {"target": "another"}, {"target": bundle.manifest.target_hash, "session": "xyz", "stream": 0}):
        with pytest.raises(ValueError, match="not a record of an answer of this bundle"):
            asyncio.run(run(record))


def test_pausing_stops_what_is_written_alone_and_nothing_else(folders: Folders, bundle: Bundle) -> None:
    patience = Patience(open=0.3, connect=0.2, silence=0.5, offline=60.0)

    async def run(address: str) -> tuple[Finished, int]:
        async with (
            EmulatedLink(port(address)) as link,
            EdgeRuntime(bundle, link.address, RuntimeOptions(patience=patience)) as runtime,
        ):
            link.silent, written = True, 0
            async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW):
                written += isinstance(event, Provisional)
                if isinstance(event, Provisional) and written == 3:
                    await runtime.pause()
                if isinstance(event, LinkState) and event.state == "waiting":
                    link.silent = False
                    link.cut()
            assert isinstance(event, Finished)
            return event, written

    with serve(make_verifier(folders)) as address:
        end, written = asyncio.run(run(address))
    assert end.token_ids == oracle(folders, PROMPT, Sampling())
    assert written == 3 and end.stats.pauses == 1


def test_answers_share_their_runtime(folders: Folders, bundle: Bundle) -> None:
    """Another answer behind a stopped or cancelled one starts clean."""

    async def run(address: str) -> list[int]:
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE)) as runtime:
            stream = runtime.generate(PROMPT, max_new_tokens=MAX_NEW)
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            return (await answer(runtime, PROMPT, Sampling()))[1]

    with serve(make_verifier(folders)) as address:
        assert asyncio.run(run(address)) == oracle(folders, PROMPT, Sampling())


def test_a_link_that_came_up_before_the_answer_is_known_to_it(folders: Folders, bundle: Bundle) -> None:
    """The first mode is chosen by the verifier's costs and the round trip, not blindly."""

    async def run(address: str) -> tuple[float | None, bool, int]:
        async with (
            EmulatedLink(port(address), delay=0.2) as link,
            EdgeRuntime(bundle, link.address, RuntimeOptions(patience=PATIENCE)) as runtime,
        ):
            while not (runtime.link and runtime.link.welcome):
                await asyncio.sleep(0.02)
            end, _, _ = await run_with(runtime)
            return runtime.controller.costs.rtt, runtime.controller.costs.curve is not None, end.stats.rounds

    verifier = make_verifier(folders)
    verifier.calibrate()
    with serve(verifier) as address:
        rtt, advertised, rounds = asyncio.run(run(address))
    assert rtt is not None and rtt >= 0.4 and advertised
    assert rounds == 0  # at 0.4 s a round, a tiny target that streams is faster from the first token on


def test_a_stop_string_in_adopted_text_ends_the_answer(folders: Folders, bundle: Bundle) -> None:
    """Written in an outage and kept: the answer ends there, as if the target had said it."""

    async def run(address: str) -> tuple[Finished, Screen]:
        async with (
            EmulatedLink(port(address)) as link,
            EdgeRuntime(
                bundle,
                link.address,
                RuntimeOptions(policy=Policy(on_return="keep"), patience=PATIENCE),
                pinned=Pinned(mode="tree"),
            ) as runtime,
        ):
            text = ""
            async for event in EdgeRuntime(bundle, None).generate(PROMPT, max_new_tokens=MAX_NEW):
                text = event.verified + event.provisional
            stop = text[20:26]
            link.silent = True
            screen = Screen()
            async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW, stop=[stop]):
                screen.show(event)
                if isinstance(event, Provisional) and event.provisional == text[: text.index(stop)]:
                    link.silent = False
                    link.cut()
            assert isinstance(event, Finished) and event.verified == text[: text.index(stop)]
            return event, screen

    with serve(make_verifier(folders)) as address:
        end, screen = asyncio.run(run(address))
    assert end.reason == "stop" and end.token_ids == screen.tokens and end.stats.adopted == len(end.token_ids)


class Failing:
    """An engine that works for some steps."""

    def __init__(self, engine: Any, steps: int) -> None:
        self.engine, self.left = engine, steps

    def step(self, *inputs: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise MemoryError("out of memory")
        return self.engine.step(*inputs)


@pytest.mark.parametrize("alone", [False, True])
def test_an_engine_that_fails_ends_the_answer_with_one_line(folders: Folders, bundle: Bundle, alone: bool) -> None:
    async def run(address: str) -> None:
        engine = Failing(open_engine(bundle, None, 1), 3)
        async with EdgeRuntime(
            bundle,
            None if alone else address,
            RuntimeOptions(patience=PATIENCE, engine=engine),
            pinned=Pinned(mode="tree"),
        ) as runtime:
            events = list[Event]()
            with pytest.raises(DrafterFailed, match="engine failed: out of memory"):
                async with asyncio.timeout(20):
                    async for event in runtime.generate(PROMPT, max_new_tokens=MAX_NEW):
                        events.append(event)
            last = events[-1]
            assert isinstance(last, Finished) and (last.reason, last.detail[:20]) == ("failed", "the drafter's engine")
            engine.left = 10**6
            end, _, _ = await run_with(runtime)
            assert end.reason == ("length" if len(end.token_ids) == MAX_NEW else "stop")
            assert bool(end.provisional) == alone

    with serve(make_verifier(folders)) as address:
        asyncio.run(run(address))


class Stuck:
    """An engine whose first step is long, and fails in the end."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.begun, self.fail = engine, threading.Event(), threading.Event()

    def step(self, *inputs: Any) -> Any:
        if self.fail.is_set():
            return self.engine.step(*inputs)
        self.begun.set()
        assert self.fail.wait(HANG)
        raise MemoryError("out of memory")


def test_what_a_cancelled_answer_asked_for_fails_alone(bundle: Bundle) -> None:
    async def run() -> Finished:
        engine = Stuck(open_engine(bundle, None, 1))
        async with EdgeRuntime(bundle, None, RuntimeOptions(engine=engine)) as runtime:
            left = runtime.generate(PROMPT, max_new_tokens=4)
            async for _ in left:
                await asyncio.to_thread(engine.begun.wait, 20)
                break
            await left.aclose()
            again = runtime.generate(PROMPT, max_new_tokens=4)
            await anext(again)
            engine.fail.set()
            *_, end = [event async for event in again]
            assert isinstance(end, Finished)
            return end

    assert len(asyncio.run(run()).token_ids) == 4


def test_an_answer_that_goes_on_after_a_pause_says_so(bundle: Bundle) -> None:
    async def run() -> list[str]:
        shown = list[str]()
        async with EdgeRuntime(bundle, None) as runtime:
            async for event in runtime.generate(PROMPT, max_new_tokens=6):
                if isinstance(event, LinkState):
                    shown.append(event.state)
                    if event.state == "waiting":
                        await runtime.proceed()
                elif isinstance(event, Provisional) and shown[-1] == "alone" and "waiting" not in shown:
                    await runtime.pause()
        return shown

    assert asyncio.run(run()) == ["connecting", "alone", "waiting", "alone"]


def test_empty_stop_strings_stop_nothing(folders: Folders, bundle: Bundle) -> None:
    async def run(address: str) -> Finished:
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE)) as runtime:
            return (await run_with(runtime, stop=["", ""]))[0]

    with serve(make_verifier(folders)) as address:
        assert asyncio.run(run(address)).token_ids == oracle(folders, PROMPT, Sampling())
