"""Two versions of the model, or of its arithmetic, behind one address: no answer mixes them, and every answer ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.links import EmulatedLink
from edge_runtime.events import Event, Finished, LinkState, Verified
from edge_runtime.link.websocket import Link
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.timeouts import Patience
from outrider.cli.doctor import Finding, examine
from outrider.local import LocalVerifier
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Cancel, ClientMessage
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.cached import cached_target
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import serve
from tests.cloud.running import Running, running
from tests.e2e.stack import MAX_NEW, SAMPLINGS, BothVersions, make_verifier, oracle
from tests.targets.plain import plain_decode_8bit
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

Folders = tuple[Path, Path, Path]
ANSWERS = 10
#: how an answer ends whose verifier has gone, which is marked by what stays provisional
ENDS = ("stop", "length", "unreachable")
PATIENCE = Patience(open=0.6, connect=0.3, silence=1.0, offline=60.0)


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The next version of the target, and a drafter for it."""
    root = tmp_path_factory.mktemp("upgraded")
    model = tiny_model(seed=6, dtype=torch.float32)
    save_tiny_drafter(root / "drafter", model, save_tiny_target(root / "target", model))
    return root / "target", root / "drafter", root


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def prompt_of(number: int) -> list[int]:
    return [20 + number, 21, 22]


async def answers(bundle: Bundle, link: BothVersions, count: int) -> list[list[Event]]:
    """Answers of one device; in each the connection is cut twice once it has verified some text."""
    seen = []
    policy = Policy(offline_rate=200.0)
    async with EdgeRuntime(
        bundle, link.address, RuntimeOptions(patience=PATIENCE, policy=policy, threads=1)
    ) as runtime:
        for number in range(count):
            events, cuts, sampling = list[Event](), 0, SAMPLINGS[number % len(SAMPLINGS)]
            async for event in runtime.generate(
                prompt_of(number), max_new_tokens=MAX_NEW, temperature=sampling.temperature, top_k=sampling.top_k,
                top_p=sampling.top_p, seed=sampling.seed,
            ):  # fmt: skip
                events.append(event)
                if isinstance(event, Verified) and cuts < 2:
                    cuts += 1
                    link.cut()
            seen.append(events)
    return seen


async def answers_of_both(bundle: Bundle, *addresses: str, count: int = ANSWERS) -> list[list[Event]]:
    async with BothVersions(*map(port_of, addresses)) as link:
        seen = await answers(bundle, link, count)
        assert link.dials > count, "both versions were met"
        return seen


def told(events: list[Event]) -> str:
    """What the badge said."""
    return "\n".join(event.detail for event in events if isinstance(event, LinkState))


def test_no_answer_mixes_two_versions_and_all_end(folders: Folders, bundle: Bundle, upgraded: Folders) -> None:
    with serve(make_verifier(folders)) as old, serve(make_verifier(upgraded)) as new:
        seen = asyncio.run(answers_of_both(bundle, new, old))
    assert len(seen) == ANSWERS
    assert any("target is" in told(events) for events in seen), list(map(told, seen))
    for number, events in enumerate(seen):
        last = events[-1]
        assert isinstance(last, Finished) and last.reason in ("stop", "length"), last
        assert last.token_ids == oracle(folders, prompt_of(number), SAMPLINGS[number % len(SAMPLINGS)])


async def replaced(bundle: Bundle, old: str, new: str) -> tuple[list[Event], list[Event]]:
    """An answer in the middle of which `new` takes the place of `old`, and the next one."""
    patience, policy = Patience(open=0.6, connect=0.3, silence=1.0, offline=1.0), Policy(offline_rate=200.0)
    events, cut = list[Event](), False
    async with (
        EmulatedLink(port_of(old)) as link,
        EdgeRuntime(bundle, link.address, RuntimeOptions(patience=patience, policy=policy, threads=1)) as runtime,
    ):
        async for event in runtime.generate(prompt_of(0), max_new_tokens=MAX_NEW):
            events.append(event)
            if isinstance(event, Verified) and not cut:
                cut, link.upstream_port = True, port_of(new)
                link.cut()
        return events, [event async for event in runtime.generate(prompt_of(0), max_new_tokens=MAX_NEW)]


def test_where_only_the_next_version_is_left_the_answer_is_finished_alone(
    folders: Folders, bundle: Bundle, upgraded: Folders
) -> None:
    """What the old one has verified stays; the rest is the device's own, and marked so."""
    with serve(make_verifier(folders)) as old, serve(make_verifier(upgraded)) as new:
        (*_, last), _ = asyncio.run(replaced(bundle, old, new))
    wanted = oracle(folders, prompt_of(0), Sampling())
    assert isinstance(last, Finished) and last.reason in ENDS and "target is" in last.detail
    assert last.provisional and 0 < last.stats.tokens < len(wanted)
    assert last.token_ids[: last.stats.tokens] == wanted[: last.stats.tokens]


# one target, two arithmetics


@dataclass(frozen=True)
class Fleet:
    """Verifier processes of one target, and what each of them writes alone."""

    whole: Running  # torch-float64
    eight: Running  # its 8-bit copy
    folders: Folders
    bundle: Bundle

    @property
    def addresses(self) -> tuple[str, str]:
        return self.whole.address, self.eight.address

    @cached_property
    def copy(self) -> TargetBundle:
        """What `eight` runs."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OUTRIDER_CACHE", str(self.folders[0].parent / "cache"))
            return cached_target(TargetSource.resolve(str(self.folders[0])))

    @property
    def eight_bits(self) -> str:
        """The arithmetic of `eight`."""
        return self.copy.arithmetic

    def texts(self, number: int, sampling: Sampling) -> dict[str, list[int]]:
        """Of each arithmetic, plain decoding's answer."""
        eos_ids = self.bundle.manifest.eos_ids
        return {
            "torch-float64": oracle(self.folders, prompt_of(number), sampling),
            self.eight_bits: plain_decode_8bit(self.copy, prompt_of(number), sampling, MAX_NEW, eos_ids),
        }


@pytest.fixture(scope="module")
def fleet(folders: Folders, bundle: Bundle) -> Iterator[Fleet]:
    root = folders[0].parent
    (root / "hash").write_text(bundle.manifest.target_hash)
    flags = (["--engine", "torch", "--dtype", "float64"], ["--engine", "onnx"])
    with ThreadPoolExecutor() as pool, ExitStack() as stack:  # both start at once
        made = pool.map(lambda engine: stack.enter_context(running(root, *engine, "--threads", "1")), flags)
        yield Fleet(*made, folders, bundle)


@pytest.mark.slow
def test_no_answer_mixes_two_arithmetics_and_all_end(fleet: Fleet) -> None:
    """A new answer takes what it finds; it is then finished by one that computes alike, or by nobody."""
    texts = [fleet.texts(number, sampling) for number, sampling in enumerate(SAMPLINGS)]
    assert sum(text["torch-float64"] != text[fleet.eight_bits] for text in texts) > len(texts) // 2
    for first, second in (("torch-float64", fleet.eight_bits), (fleet.eight_bits, "torch-float64")):
        addresses = fleet.addresses if second == fleet.eight_bits else reversed(fleet.addresses)
        seen = asyncio.run(answers_of_both(fleet.bundle, *addresses, count=len(texts)))
        for text, events in zip(texts, seen, strict=True):
            last = events[-1]
            assert isinstance(last, Finished) and last.reason in ("stop", "length"), last
            assert last.token_ids == text[first]
        why = f"begun in {first} arithmetic, and this verifier computes in {second}"
        assert any(why in told(events) for events in seen), list(map(told, seen))


def test_where_only_the_other_arithmetic_is_left_the_answer_is_finished_alone(fleet: Fleet) -> None:
    """As where only another target is left; the next answer is that verifier's, at once."""
    (*_, last), following = asyncio.run(replaced(fleet.bundle, *fleet.addresses))
    texts = fleet.texts(0, Sampling())
    assert isinstance(last, Finished) and last.reason in ENDS and last.provisional
    assert f"begun in torch-float64 arithmetic, and this verifier computes in {fleet.eight_bits}" in last.detail
    assert 0 < last.stats.tokens < len(texts["torch-float64"])
    assert last.token_ids[: last.stats.tokens] == texts["torch-float64"][: last.stats.tokens]
    end = following[-1]
    assert isinstance(end, Finished) and end.reason in ("stop", "length") and end.token_ids == texts[fleet.eight_bits]
    assert "arithmetic" not in told(following)


def test_an_answer_that_is_torn_off_leaves_the_next_one_free(folders: Folders, bundle: Bundle) -> None:
    """Nothing waits for a network that takes nothing: neither the answer's last message nor its end."""

    async def run(server: str) -> None:
        async with (
            EmulatedLink(int(server.rsplit(":", 1)[1])) as network,
            EdgeRuntime(
                bundle, network.address, RuntimeOptions(patience=PATIENCE, threads=1), pinned=Pinned(mode="stream")
            ) as runtime,
        ):
            link, written, sent = runtime.link, asyncio.Event(), list[ClientMessage]()
            assert isinstance(link, Link)
            send = link.send

            def watch(message: ClientMessage) -> None:
                sent.append(message)
                send(message)

            async def read() -> None:
                async for event in runtime.generate(prompt_of(1), max_new_tokens=100):
                    if isinstance(event, Verified):
                        written.set()

            link.send = watch  # type: ignore[method-assign]
            task = asyncio.create_task(read())
            await asyncio.wait_for(written.wait(), HANG)
            assert link.hello.arithmetic == "torch-float64"
            network.held = True
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert isinstance(sent[-1], Cancel)
            assert link.hello.arithmetic == "" and runtime.record() is None

    verifier = make_verifier(folders)
    with serve(verifier) as address:
        asyncio.run(run(address))


async def begun(bundle: Bundle, server: str) -> dict[str, Any]:
    """The record of an answer whose first tokens the verifier at `server` wrote."""
    async with EdgeRuntime(bundle, server, RuntimeOptions(patience=PATIENCE, threads=1)) as runtime:
        async for event in runtime.generate(prompt_of(1), max_new_tokens=MAX_NEW):
            record: dict[str, Any] = json.loads(json.dumps(runtime.record()))
            if isinstance(event, Verified) and len(record["committed"]) > 3:
                return record
    raise AssertionError("it ended before it was looked at")


def test_a_record_goes_on_where_it_was_begun(fleet: Fleet) -> None:
    """Even where the link already leads to the other one; a record that names none goes on anywhere."""

    async def run() -> tuple[dict[str, Any], Finished, Finished]:
        record = await begun(fleet.bundle, fleet.eight.address)
        ends = []
        for known in (True, False):
            async with (
                BothVersions(*map(port_of, fleet.addresses)) as link,
                EdgeRuntime(fleet.bundle, link.address, RuntimeOptions(patience=PATIENCE, threads=1)) as runtime,
            ):
                while not (runtime.link and runtime.link.welcome):
                    await asyncio.sleep(0.01)
                assert runtime.link.welcome.arithmetic == "torch-float64"
                given = record if known else record | {"arithmetic": ""}
                *_, end = [event async for event in runtime.resume(given)]
                assert isinstance(end, Finished) and end.reason in ("stop", "length")
                assert link.dials == (2 if known else 1)
                ends.append(end)
        return record, *ends

    record, end, old = asyncio.run(run())
    texts = fleet.texts(1, Sampling())
    assert record["arithmetic"] == fleet.eight_bits and texts[fleet.eight_bits] != texts["torch-float64"]
    assert end.token_ids == texts[fleet.eight_bits] and old.token_ids != texts[fleet.eight_bits]


def test_a_record_does_not_go_on_in_a_process_that_computes_otherwise(fleet: Fleet) -> None:
    """There is no other verifier there; what is asked next is answered."""
    target, drafter, _ = fleet.folders
    local = LocalVerifier.load(
        fleet.bundle, str(target), drafter, dtype="float64", threads=1, max_model_len=120, kv_tokens=300
    )

    async def run() -> Finished:
        record = await begun(fleet.bundle, fleet.eight.address)
        async with EdgeRuntime(fleet.bundle, local, RuntimeOptions(threads=1)) as runtime:
            for _ in range(2):
                with pytest.raises(ValueError, match=f"begun in {fleet.eight_bits} arithmetic, and the target in this"):
                    _ = [event async for event in runtime.resume(record)]
            *_, end = [event async for event in runtime.generate(prompt_of(1), max_new_tokens=MAX_NEW)]
        assert isinstance(end, Finished)
        return end

    with local:
        assert asyncio.run(run()).token_ids == fleet.texts(1, Sampling())["torch-float64"]


def test_the_doctor_sees_that_replicas_compute_differently(fleet: Fleet) -> None:
    async def look(*addresses: str) -> dict[str, Finding]:
        async with BothVersions(*map(port_of, addresses)) as link:
            found = await examine(fleet.folders[2], link.address, threads=1, tell=lambda finding: None)
            return {finding.name: finding for finding in found}

    found = asyncio.run(look(*fleet.addresses))
    assert found["verifier"].level == "good" and found["verifier"].figures["arithmetic"] == "torch-float64"
    assert found["replicas"].level == "warning" and fleet.eight_bits in found["replicas"].text
    assert "replicas" not in asyncio.run(look(fleet.eight.address))
