"""Random faults of the link in random answers: nothing may be lost, duplicated or other than the target's."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import numpy as np
from rich.progress import Progress

from benchmarks.command import Figures
from benchmarks.links import PROFILES, EmulatedLink, Profile
from edge_runtime.events import Finished, Provisional, RolledBack, Verified
from edge_runtime.policy import Policy
from edge_runtime.runtime import EdgeRuntime
from outrider_core.machine import describe_machine

if TYPE_CHECKING:
    from benchmarks.network import Bench


async def break_answers(bench: Bench) -> Figures:
    """Random faults in random answers over every profile, until --cuts of them have happened.

    understudy_tokens: of the provisional ones. given_up: answers that ended unverified, because the link stayed away
    for too long; what was verified of them is compared all the same.
    """
    options, rng = bench.options, random.Random(bench.options.seed)
    verifier = await bench.verifier()
    answers = wrong = lost = given_up = provisional = understudy = rolled_back = faults = 0
    policy = Policy(understudy=options.understudy)
    stalls: list[float] = []
    with Progress(console=bench.console, transient=True) as progress:
        bar = progress.add_task("faults", total=options.cuts)
        while faults < options.cuts:
            profile = PROFILES[options.profiles[answers % len(options.profiles)]]
            async with (
                EmulatedLink(verifier.port, profile, rng.randrange(2**32)) as link,
                EdgeRuntime(bench.bundle, link.address, threads=bench.threads, policy=policy) as runtime,
                link.weather(),
            ):
                breaker = asyncio.create_task(_break(link, rng, profile))
                shown, verified, number = list[int](), 0, rng.randrange(len(bench.prompts))
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
                answers += 1
                faults += link.cuts
                over = event.reason in ("stop", "length")
                given_up += not over
                truth = bench.truth[number]
                wrong += (event.token_ids if over else shown[:verified]) != (truth if over else truth[:verified])
                lost += shown != event.token_ids
                stalls += event.stats.stall_seconds
                provisional += event.stats.provisional
                understudy += event.stats.understudy
                rolled_back += event.stats.rolled_back
                progress.update(bar, completed=faults)
    return {
        "machine": describe_machine(), "cuts": faults, "answers": answers,
        "understudy": options.understudy, "understudy_tokens": understudy,
        "answers_that_differ": wrong, "screens_that_differ": lost, "given_up": given_up, "provisional": provisional,
        "rolled_back": rolled_back, "stalls": len(stalls),
        "stall_ms_p95": round(1000 * float(np.percentile(stalls, 95))) if stalls else None,
    }  # fmt: skip


def harmed(figures: Figures) -> int:
    """Answers and screens that --cuts left other than the target's; these make the command fail."""
    return int(figures.get("answers_that_differ", 0) + figures.get("screens_that_differ", 0))


async def _break(link: EmulatedLink, rng: random.Random, profile: Profile) -> None:
    """One to five faults; between them some rounds get through."""
    for _ in range(rng.randint(1, 5)):
        await asyncio.sleep(rng.expovariate(1 / (0.8 + 4 * profile.rtt / 1000)))
        if rng.random() < 0.6:
            link.cut()
        else:
            link.silent = True
            link.cuts += 1
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            link.silent = False
