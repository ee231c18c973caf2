"""Random link faults in random answers: no text may be lost, duplicated or different from the target's."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from rich.progress import Progress

from benchmarks.command import Figures
from benchmarks.links import PROFILES, LabLink, Profile
from edge_runtime.events import Finished, Provisional, RolledBack, Verified
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from outrider_core.machine import describe_machine
from outrider_core.protocol.ending import COMPLETE

if TYPE_CHECKING:
    from benchmarks.network import Bench


@dataclass
class _Counts:
    """Outcomes of all answers so far. stalls: seconds to the first offline token."""

    faults: int = 0
    begun: int = 0
    answers: int = 0
    wrong: int = 0
    lost: int = 0
    given_up: int = 0
    provisional: int = 0
    understudy: int = 0
    rolled_back: int = 0
    stalls: list[float] = field(default_factory=list)


async def break_answers(bench: Bench) -> Figures:
    """Random faults in random answers over every profile, until --cuts of them have happened; --devices at once.

    understudy_tokens: of the provisional ones. given_up: answers that ended unverified, because the link stayed away
    for too long; what was verified of them is compared all the same. Ctrl-C ends it early, with what was done so far.
    """
    options, rng = bench.options, random.Random(bench.options.seed)
    verifier, counts, interrupted = await bench.verifier(), _Counts(), False
    with Progress(console=bench.console, transient=True) as progress:
        bar = progress.add_task("faults", total=options.cuts)

        async def one_device() -> None:
            while counts.faults < options.cuts:
                await _break_one(bench, verifier.port, rng, counts)
                progress.update(bar, completed=counts.faults)

        try:
            await asyncio.gather(*(one_device() for _ in range(options.devices)))
        except asyncio.CancelledError:
            interrupted = True
    stalls = counts.stalls
    return {
        "machine": describe_machine(), "packets": options.packets, "cuts": counts.faults, "answers": counts.answers,
        "devices": options.devices,
        "understudy": options.understudy, "understudy_tokens": counts.understudy, "interrupted": interrupted,
        "answers_that_differ": counts.wrong, "screens_that_differ": counts.lost, "given_up": counts.given_up,
        "provisional": counts.provisional, "rolled_back": counts.rolled_back, "stalls": len(stalls),
        "stall_ms_p95": round(1000 * float(np.percentile(stalls, 95))) if stalls else None,
    }  # fmt: skip


async def _break_one(bench: Bench, port: int, rng: random.Random, counts: _Counts) -> None:
    """Cause faults in one answer over the next profile."""
    options = bench.options
    profile = PROFILES[options.profiles[counts.begun % len(options.profiles)]]
    number, counts.begun = rng.randrange(len(bench.prompts)), counts.begun + 1
    policy = Policy(understudy=options.understudy)
    async with (
        bench.link(port, profile, rng.randrange(2**32)) as link,
        EdgeRuntime(
            bench.bundle, link.address, RuntimeOptions(threads=bench.threads, policy=policy, **bench.pass_)
        ) as runtime,
        link.weather(),
    ):
        breaker = asyncio.create_task(_break(link, rng, profile))
        shown, verified = list[int](), 0
        async for event in runtime.generate(bench.prompts[number], max_new_tokens=options.max_new_tokens):
            match event:
                case Verified(tokens=tokens):
                    shown[verified:] = tokens + shown[verified + len(tokens) :]
                    verified += len(tokens)
                case Provisional(token=token):
                    shown.append(token)
                case RolledBack(count=count):
                    del shown[len(shown) - count :]
        breaker.cancel()
        assert isinstance(event, Finished)
        over, truth = event.reason in COMPLETE and not event.provisional, bench.truth[number]
        counts.answers += 1
        counts.faults += link.cuts
        counts.given_up += not over
        counts.wrong += (event.token_ids if over else shown[:verified]) != (truth if over else truth[:verified])
        counts.lost += shown != event.token_ids
        counts.stalls += event.stats.stall_seconds
        counts.provisional += event.stats.provisional
        counts.understudy += event.stats.understudy
        counts.rolled_back += event.stats.rolled_back


def harmed(figures: Figures) -> int:
    """Return how many answers and screens differ from the target's after --cuts; these make the command fail."""
    return int(figures.get("answers_that_differ", 0) + figures.get("screens_that_differ", 0))


async def _break(link: LabLink, rng: random.Random, profile: Profile) -> None:
    """Cause one to five faults, between which some rounds get through."""
    for _ in range(rng.randint(1, 5)):
        await asyncio.sleep(rng.expovariate(1 / (0.8 + 4 * profile.rtt / 1000)))
        if rng.random() < 0.6:
            link.cut()
        else:
            link.silent = True
            link.cuts += 1
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            link.silent = False
