"""The Kotlin runtime against a real verifier process: the oracle's text, whatever happens to link and server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links import EmulatedLink
from export.bundle.verifier_process import VerifierProcess
from outrider_core.chat.api.constraints import constraint_of
from outrider_core.models.target import load_target
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.android.device import MAX_CONTEXT, PATIENCE, Device, Screen, verifier_of, words
from tests.cloud.drive import serve
from tests.e2e.stack import BothVersions, make_verifier
from tests.tiny import plain_decode

MAX_NEW = 40
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=11),
    Sampling(temperature=1.0, seed=12),
    Sampling(temperature=1.0, top_p=0.9, top_k=40, seed=13),
]
PROMPTS = [[1, 20, 30, 40], [1, *range(60, 90)], [1, 5]]
#: waits for the first link however slowly it comes, so that an answer begins with the target
UNHURRIED = asdict(replace(PATIENCE, connect=30.0))


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path]) -> Callable[[int, int], list[int]]:
    """The answer to a prompt under a sampling, by their numbers: plain decoding."""
    model = load_target(TargetSource.resolve(str(folders["target"])), "float64").model

    @cache
    def decode(prompt: int, sampling: int) -> list[int]:
        return plain_decode(model, PROMPTS[prompt], SAMPLINGS[sampling], MAX_NEW, max_context=MAX_CONTEXT)

    return decode


@asynccontextmanager
async def linked(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, **settings: Any
) -> AsyncIterator[tuple[Device, EmulatedLink]]:
    async with (
        EmulatedLink(verifier.port) as link,
        Device(classpath, folders["bundle"], link.address, **settings) as device,
    ):
        yield device, link


def check(screen: Screen, wanted: list[int]) -> None:
    """The oracle's text, all of it verified, every token written alone accounted for."""
    end = screen.end
    assert end["token_ids"] == screen.tokens == wanted and screen.verified == len(wanted)
    assert end["reason"] in ("stop", "length") and end["verified"] == words(wanted) and not end["provisional"]
    stats = end["stats"]
    assert stats["tokens"] == len(wanted) and stats["kept"] + stats["rolled_back"] == stats["provisional"]


@pytest.mark.parametrize("mode", [None, "TREE", "STREAM"])
def test_text_is_the_oracles(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, truth: Any, mode: str | None
) -> None:
    async def run() -> list[Screen]:
        screens = []
        async with linked(classpath, folders, verifier, mode=mode, ahead=mode and True) as (device, _):
            for prompt in range(len(PROMPTS)):
                for sampling in range(len(SAMPLINGS)):
                    wanted = truth(prompt, sampling)
                    script = [*PROMPTS[prompt], *wanted] if prompt else []
                    device.ask(PROMPTS[prompt], SAMPLINGS[sampling], MAX_NEW, script=script)
                    screens.append(await device.watch())
                    check(screens[-1], wanted)
        return screens

    stats = [screen.end["stats"] for screen in asyncio.run(run())]
    if mode == "TREE":
        assert sum(stat["streamed"] for stat in stats) == 0
        assert sum(stat["tau"] for stat in stats[4:]) / len(stats[4:]) > 2  # a foreseen text comes in long paths
        assert sum(stat["ahead_hits"] for stat in stats) > 0
    if mode == "STREAM":
        assert sum(stat["streamed"] for stat in stats) > 0
    assert all(stat["bytes_up"] > 0 and stat["bytes_down"] > 0 for stat in stats)


def test_biases_and_penalties_hold_whoever_writes(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess
) -> None:
    """The link is cut in the middle: the text is plain decoding under the same constraint."""
    model = load_target(TargetSource.resolve(str(folders["target"])), "float64").model
    fields = {"logit_bias": {"20": 2.5, "21": -100, "33": 1.5}, "frequency_penalty": 0.7, "presence_penalty": 0.4}

    async def run() -> list[Screen]:
        screens = []
        async with linked(classpath, folders, verifier, mode="TREE") as (device, link):
            for sampling in SAMPLINGS[:2]:

                async def each(screen: Screen) -> None:
                    if len(screen.events) == 6:
                        link.cut()

                device.ask(PROMPTS[1], sampling, MAX_NEW, held_to=fields)
                screens.append(await device.watch(each))
        return screens

    for sampling, screen in zip(SAMPLINGS, asyncio.run(run()), strict=False):
        constraint = constraint_of(len(PROMPTS[1]), 200, **fields)
        assert constraint is not None
        rules = Rules(constraint)
        check(screen, plain_decode(model, PROMPTS[1], sampling, MAX_NEW, max_context=MAX_CONTEXT, rules=rules))


def test_what_the_verifier_cannot_obey_ends_the_answer(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess
) -> None:
    """Nobody takes the tiny target's tokenizer apart, so its verifier offers no grammars."""

    async def run() -> Screen:
        async with linked(classpath, folders, verifier) as (device, _):
            device.ask(PROMPTS[0], held_to={"response_format": {"type": "json_object"}})
            return await device.watch()

    end = asyncio.run(run()).end
    assert end["reason"] == "refused" and "offers no structured output" in end["detail"]
    assert not end["token_ids"]


@pytest.mark.parametrize("own_transport", [False, True])
def test_no_token_is_lost_in_fifty_answers_with_faults(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, truth: Any, own_transport: bool
) -> None:
    """Over the library's sockets, and over an app's own WebSocket, which sends no pings for the link."""
    rng = random.Random(0)
    faults: dict[str, int] = {}

    async def mishap(link: EmulatedLink, kind: str, seconds: float) -> None:
        if kind == "reset":
            link.cut()
        elif kind == "half-open":
            link.silent = True
            await asyncio.sleep(seconds)
            link.silent = False
            link.cut()
        elif kind == "silence":
            link.silent = True  # what is swallowed never comes, though the sockets live on
            await asyncio.sleep(seconds)
            link.silent = False
        else:
            link.held = True
            await asyncio.sleep(seconds)
            link.held = False

    async def run() -> list[Screen]:
        screens = []
        async with linked(classpath, folders, verifier, own_transport=own_transport) as (device, link):
            link.delay = 0.003
            for number in range(50):
                prompt, sampling = rng.randrange(len(PROMPTS)), rng.randrange(len(SAMPLINGS))
                wanted = truth(prompt, sampling)
                kind, at = rng.choice(["reset", "half-open", "silence", "held"]), rng.randrange(1, 12)
                seconds, tasks = rng.uniform(0.05, 0.7), list[asyncio.Task[None]]()

                async def each(screen: Screen) -> None:
                    if len(screen.events) == at:  # noqa: B023 - the answer ends before the next begins
                        faults[kind] = faults.get(kind, 0) + 1  # noqa: B023
                        tasks.append(asyncio.create_task(mishap(link, kind, seconds)))  # noqa: B023

                script = [*PROMPTS[prompt], *wanted] if number % 2 else []
                device.ask(PROMPTS[prompt], SAMPLINGS[sampling], MAX_NEW, script=script)
                screens.append(await device.watch(each))
                await asyncio.gather(*tasks)
                check(screens[-1], wanted)
        return screens

    stats = [screen.end["stats"] for screen in asyncio.run(run())]
    assert sum(faults.values()) >= 40 and len(faults) == 4
    assert sum(stat["provisional"] for stat in stats) > 50 and sum(stat["kept"] for stat in stats) > 0
    assert sum(stat["rolled_back"] for stat in stats) > 0 and sum(stat["stalls"] for stat in stats) > 5


def test_verifier_killed_or_ended_and_started_again(
    classpath: list[Path], folders: dict[str, Path], truth: Any
) -> None:
    server = verifier_of(folders)
    server.start()
    server.wait_ready()
    downs: list[int] = []
    end = [server.stop, server.kill]

    async def each(screen: Screen) -> None:
        if len(screen.events) == 3 and not downs:
            downs.append(1)
            await asyncio.to_thread(end.pop())
        if len(screen.tokens) > screen.verified and len(downs) == 1:
            downs.append(2)
            server.start()
            await asyncio.to_thread(server.wait_ready)

    async def run() -> None:
        async with Device(classpath, folders["bundle"], server.address) as device:
            for sampling in (0, 2):
                downs.clear()
                wanted = truth(1, sampling)
                device.ask(PROMPTS[1], SAMPLINGS[sampling], MAX_NEW)
                check(await device.watch(each), wanted)

    try:
        asyncio.run(run())
    finally:
        server.stop()


def test_an_app_that_is_killed_goes_on(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, truth: Any
) -> None:
    """Killed while it writes alone; another process takes the record up, and the text is the oracle's."""
    wanted = truth(1, 1)

    async def run() -> None:
        # trees over a delay: the silence comes rounds before the answer's end
        async with EmulatedLink(verifier.port, delay=0.05) as link:
            device = Device(classpath, folders["bundle"], link.address, mode="TREE", patience=UNHURRIED)
            async with device:
                device.ask(PROMPTS[1], SAMPLINGS[1], MAX_NEW, script=[*PROMPTS[1], *wanted[:20]])
                screen, record, asked = Screen(), None, False
                while record is None:
                    event = await device.hear()
                    if event["event"] == "record":
                        record = event["record"]
                        continue
                    screen.show(event)
                    assert event["event"] != "finished"
                    if screen.verified > 3:
                        link.silent = True
                    if link.silent and not asked and len(screen.tokens) - screen.verified >= 5:
                        asked = True
                        device.say("record")
                assert device.process
                device.process.kill()
                await device.process.wait()
            link.silent = False
            told = json.loads(record)
            answer = told["committed"] + told["provisional"]
            assert told["committed"] and told["committed"] == wanted[: len(told["committed"])]
            assert len(told["provisional"]) >= 5
            async with Device(classpath, folders["bundle"], link.address) as device:
                device.ask([], record=record)
                screen = Screen(list(answer), len(told["committed"]))
                screen = await device.watch(screen=screen)
                assert screen.tokens == screen.end["token_ids"] == wanted and screen.verified == len(wanted)

    asyncio.run(run())


def test_an_answer_keeps_to_one_arithmetic(classpath: list[Path], folders: dict[str, Path], truth: Any) -> None:
    """Replicas that name different ones behind one address; where only the other is left, the device finishes alone."""

    async def run(*ports: int) -> None:
        async with BothVersions(*ports) as link:
            link.delay = 0.05  # and trees, and little is written alone: both cuts come rounds before the answer's end
            records = list[str]()

            async def each(screen: Screen) -> None:
                linked = link.dials >= 1 + 2 * len(records)  # to the right one, again
                if screen.events[-1]["event"] == "verified" and len(records) < 2 and linked:
                    device.say("record")
                    while (event := await device.hear())["event"] != "record":
                        assert event["event"] != "finished"
                        screen.show(event)
                    records.append(event["record"])
                    link.cut()

            async with Device(
                classpath, folders["bundle"], link.address, offline_rate=5.0, mode="TREE", patience=UNHURRIED
            ) as device:
                device.ask(PROMPTS[1], SAMPLINGS[1], MAX_NEW)
                screen = await device.watch(each)
                check(screen, truth(1, 1))
                assert any("begun in one arithmetic" in event.get("detail", "") for event in screen.events)
            assert json.loads(records[0])["arithmetic"] == "one" and link.dials >= 5  # one, other, one, other, one
            link.ports, link.delay = ports[1:], 0.0
            patience = {"open": 0.6, "connect": 0.3, "silence": 1.0, "offline": 1.0}
            address, settings = link.address, {"patience": patience, "offline_rate": 200.0}
            async with Device(classpath, folders["bundle"], address, **settings) as device:
                device.ask(PROMPTS[2], max_new=MAX_NEW)
                check(await device.watch(), truth(2, 0))
                device.ask([], record=records[1])
                end = (await device.watch(screen=Screen(texts=False))).end
                assert end["reason"] in ("stop", "length", "unreachable") and end["provisional"]
                assert "begun in one arithmetic" in end["detail"]
                device.ask(PROMPTS[2], max_new=MAX_NEW)
                check(await device.watch(), truth(2, 0))

    models = (folders["target"], folders["drafter"], folders["bundle"])
    one, other = make_verifier(models), make_verifier(models)
    one.arithmetic, other.arithmetic = "one", "other"
    with serve(one) as first, serve(other) as second:
        asyncio.run(run(*(int(address.rsplit(":", 1)[1]) for address in (first, second))))


def test_an_understudy_takes_over(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, truth: Any
) -> None:
    """While the target is silent it writes on from what the drafter began; the text is the target's in the end."""

    async def run(use: str) -> Screen:
        settings = {"hash_understudy": True, "understudy": use, "mode": "TREE", "patience": UNHURRIED}
        async with linked(classpath, folders, verifier, **settings) as (device, link):
            link.delay = 0.02  # the silence comes rounds before the answer's end
            screen = Screen()

            async def silence(screen: Screen) -> None:
                link.silent = link.silent or (screen.verified >= 4 and len(screen.tokens) == screen.verified)
                written = [event for event in screen.events if event.get("writer") == "understudy"]
                if sum(event["event"] == "written" for event in written) >= 3:
                    link.silent = False

            device.ask(PROMPTS[0], SAMPLINGS[1], MAX_NEW)
            return await device.watch(silence, screen)

    for use in ("COLD", "WARM"):
        screen = asyncio.run(run(use))
        check(screen, truth(0, 1))
        kinds = [event["event"] for event in screen.events]
        overs = [event["writer"] for event in screen.events if event["event"] == "handed_over"]
        assert overs and set(overs) == {"understudy"}
        assert kinds.index("link", kinds.index("verified")) < kinds.index("handed_over")
        assert screen.end["stats"]["understudy"] >= 3
        assert screen.end["spans"] == [[0, len(screen.tokens), "target"]]
        assert not any(event["detail"] for event in screen.events if event["event"] == "handed_over")


def test_an_understudy_drafts(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, truth: Any
) -> None:
    """It knows most of the text, and the drafter nothing. In every other answer the link is cut."""

    async def run(asked: list[tuple[int, int]]) -> list[Screen]:
        screens = []
        settings = {"hash_understudy": True, "understudy": "WARM", "mode": "TREE"}
        async with linked(classpath, folders, verifier, **settings) as (device, link):
            link.delay = 0.02
            for number, (prompt, sampling) in enumerate(asked):

                async def each(screen: Screen) -> None:
                    if number % 2 and len(screen.events) == 5:  # noqa: B023 - the answer ends before the next begins
                        link.cut()

                wanted = truth(prompt, sampling)
                script = [*PROMPTS[prompt], *wanted]
                device.ask(PROMPTS[prompt], SAMPLINGS[sampling], MAX_NEW, understudy_script=script)
                screens.append(await device.watch(each))
                check(screens[-1], wanted)
        return screens

    asked = [(prompt, sampling) for prompt in range(len(PROMPTS)) for sampling in range(len(SAMPLINGS))]
    stats = [screen.end["stats"] for screen in asyncio.run(run(asked))]
    calm, cut = stats[::2], stats[1::2]
    assert sum(stat["chains"] for stat in calm) > sum(stat["rounds"] for stat in calm) / 2
    assert sum(stat["tau"] for stat in calm) > 2 * len(calm)
    assert all(stat["opens"] > 1 for stat in cut) and sum(stat["chains"] for stat in cut) > 0


def test_policies(classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, truth: Any) -> None:
    wanted = truth(0, 0)

    async def alone() -> None:
        async with Device(classpath, folders["bundle"], None, offline_rate=1e-6) as device:  # nothing holds it up
            device.ask(PROMPTS[0], script=[*PROMPTS[0], *wanted])
            end = (await device.watch()).end
            assert end["reason"] == "length" and end["verified"] == "" and end["stats"]["provisional"] == MAX_NEW

    async def device_first() -> None:
        async with linked(classpath, folders, verifier, writer="PREFER_DEVICE") as (device, _):
            for number in (0, 2):
                device.ask(PROMPTS[1], SAMPLINGS[number], MAX_NEW)
                screen = await device.watch()
                check(screen, truth(1, number))
                assert screen.end["stats"]["provisional"] > 0

    async def kept() -> None:
        async with linked(classpath, folders, verifier, on_return="KEEP") as (device, link):
            link.held = True

            async def each(screen: Screen) -> None:
                link.held = len(screen.tokens) < 6

            device.ask(PROMPTS[1], max_new=30)
            end = (await device.watch(each)).end
            assert end["stats"]["adopted"] > 0 and end["stats"]["rolled_back"] == 0

    async def held_up() -> None:
        times = list[float]()
        async with linked(classpath, folders, verifier, offline_rate=10.0) as (device, link):
            link.held = True

            async def each(screen: Screen) -> None:
                times.append(time.monotonic())
                link.held = len(screen.tokens) < 5

            device.ask(PROMPTS[0])
            check(await device.watch(each), wanted)
        assert len(times) > 5 and times[-1] - times[0] > 3 / 10

    async def paused() -> None:
        async with linked(classpath, folders, verifier) as (device, link):
            link.silent = True
            asked = False

            async def each(screen: Screen) -> None:
                nonlocal asked
                if len(screen.tokens) == 3 and not asked:
                    device.say("pause")
                if screen.events[-1].get("detail") == "paused on request":
                    asked = True
                    count = len(screen.tokens)
                    await asyncio.sleep(0.3)
                    device.say("proceed")
                    assert len(screen.tokens) == count
                    link.silent = False

            device.ask(PROMPTS[0])
            check(await device.watch(each), wanted)
            assert asked

    for case in (alone, device_first, kept, held_up, paused):
        asyncio.run(case())


def test_stop_strings_end_the_answer(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, truth: Any
) -> None:
    wanted = truth(1, 0)

    async def run() -> None:
        async with linked(classpath, folders, verifier) as (device, _):
            device.ask(PROMPTS[1], SAMPLINGS[0], MAX_NEW, stop=[f"w{wanted[9]}"])
            end = (await device.watch(screen=Screen(texts=False))).end
            first = wanted.index(wanted[9])
            assert end["reason"] == "stop" and end["verified"].strip() == words(wanted[:first])

    asyncio.run(run())


def test_a_verifier_of_another_drafter_leaves_the_device_alone(
    classpath: list[Path], folders: dict[str, Path], verifier: VerifierProcess, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folders["bundle"].iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "drafter_hash": "0" * 16}))

    async def answer() -> Screen:
        patience = {"open": 0.6, "connect": 0.3, "silence": 1.0, "offline": 0.5}
        async with Device(classpath, other, verifier.address, patience=patience, offline_rate=100.0) as device:
            device.ask(PROMPTS[0], max_new=8)
            return await device.watch()

    end = asyncio.run(answer()).end
    assert end["reason"] == "length" and end["provisional"] and not end["verified"] and "drafter" in end["detail"]


@pytest.mark.parametrize(
    ("server", "text"),
    [("ws://192.0.2.1:8765", "clear text"), ("wss://there:99999", "not an address"), ("a..b:1", "not an address")],
)
def test_what_will_never_do_is_refused(classpath: list[Path], folders: dict[str, Path], server: str, text: str) -> None:
    async def start() -> Screen:
        async with Device(classpath, folders["bundle"], server) as device:
            return await device.watch()

    refused = asyncio.run(start()).events[-1]
    assert refused["event"] == "refused" and text in refused["text"] and "wss://" in refused["text"]
