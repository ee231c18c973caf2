"""Two versions of the model behind one address: no answer mixes them, and every answer ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from benchmarks.links import EmulatedLink
from edge_runtime.events import Event, Finished, LinkState, Verified
from edge_runtime.policy import Policy
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.timing import Patience
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, SAMPLINGS, make_verifier, oracle
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model

Folders = tuple[Path, Path, Path]
ANSWERS = 10
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


class BothVersions(EmulatedLink):
    """One address; every connection goes to the other version than the one before."""

    def __init__(self, *ports: int) -> None:
        super().__init__(ports[0])
        self.ports, self.dials = ports, 0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.upstream_port = self.ports[self.dials % len(self.ports)]
        self.dials += 1
        await super()._accept(reader, writer)


async def answers(bundle: Bundle, link: BothVersions) -> list[list[Event]]:
    """Ten answers of one device; in each the connection is cut twice once it has verified some text."""
    seen = []
    policy = Policy(offline_rate=200.0)
    async with EdgeRuntime(bundle, link.address, patience=PATIENCE, policy=policy, threads=1) as runtime:
        for number in range(ANSWERS):
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


def test_no_answer_mixes_two_versions_and_all_end(folders: Folders, bundle: Bundle, upgraded: Folders) -> None:
    async def run(old: int, new: int) -> list[list[Event]]:
        async with BothVersions(new, old) as link:
            seen = await answers(bundle, link)
            assert link.dials > ANSWERS, "both versions were met"
            return seen

    with serve(make_verifier(folders)) as old, serve(make_verifier(upgraded)) as new:
        seen = asyncio.run(run(port_of(old), port_of(new)))
    assert len(seen) == ANSWERS
    told = [event.detail for events in seen for event in events if isinstance(event, LinkState)]
    assert any("target is" in detail for detail in told), told
    for number, events in enumerate(seen):
        last = events[-1]
        assert isinstance(last, Finished) and last.reason in ("stop", "length"), last
        assert last.token_ids == oracle(folders, prompt_of(number), SAMPLINGS[number % len(SAMPLINGS)])


def test_where_only_the_next_version_is_left_the_answer_is_finished_alone(
    folders: Folders, bundle: Bundle, upgraded: Folders
) -> None:
    """What the old one has verified stays; the rest is the device's own, and marked so."""

    async def run(old: int, new: int) -> list[Event]:
        patience, policy = Patience(open=0.6, connect=0.3, silence=1.0, offline=1.0), Policy(offline_rate=200.0)
        events, cut = list[Event](), False
        async with (
            EmulatedLink(old) as link,
            EdgeRuntime(bundle, link.address, patience=patience, policy=policy, threads=1) as runtime,
        ):
            async for event in runtime.generate(prompt_of(0), max_new_tokens=MAX_NEW):
                events.append(event)
                if isinstance(event, Verified) and not cut:
                    cut, link.upstream_port = True, new
                    link.cut()
        return events

    with serve(make_verifier(folders)) as old, serve(make_verifier(upgraded)) as new:
        *_, last = asyncio.run(run(port_of(old), port_of(new)))
    wanted = oracle(folders, prompt_of(0), Sampling())
    assert isinstance(last, Finished) and last.reason == "unverified" and "target is" in last.detail
    assert last.provisional and 0 < last.stats.tokens < len(wanted)
    assert last.token_ids[: last.stats.tokens] == wanted[: last.stats.tokens]
