"""The whole stack on a tiny random float64 target: exported bundle, runtime, socket, faults, verifier.

The oracle is plain decoding without any cache. Sessions run at once, the pool is too small for all of them,
and links are reset or fall silent at random moments.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from benchmarks.links import EmulatedLink
from edge_runtime.events import Finished, Verified
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from outrider_core.drafting.bundle import Bundle
from outrider_core.drafting.drafter import TreeShape
from outrider_core.protocol.sampling import Sampling
from tests.cloud.drive import serve
from tests.e2e.stack import MAX_NEW, PATIENCE, SAMPLINGS, Screen, answer, make_verifier, oracle


async def break_links(link: EmulatedLink, rng: random.Random) -> None:
    for _ in range(10):
        await asyncio.sleep(rng.uniform(0.05, 0.6))
        if rng.random() < 0.6:
            link.cut()
        else:
            link.silent = True
            await asyncio.sleep(rng.uniform(0.3, 1.5))
            link.silent = False


@pytest.mark.parametrize(
    ("faults", "each"),
    [pytest.param(False, 2, marks=pytest.mark.slow), (True, 1), pytest.param(True, 2, marks=pytest.mark.slow)],
)
def test_concurrent_answers_equal_plain_decoding(
    folders: tuple[Path, Path, Path], bundle: Bundle, faults: bool, each: int
) -> None:
    rng = random.Random(7)
    jobs = [([rng.randrange(4, 190) for _ in range(rng.randrange(1, 50))], sampling) for sampling in SAMPLINGS * each]

    async def run(address: str) -> list[tuple[Finished, list[int]]]:
        async with EmulatedLink(int(address.rsplit(":", 1)[1])) as link:
            breaker = asyncio.create_task(break_links(link, rng)) if faults else None

            async def one(number: int, prompt: list[int], sampling: Sampling) -> tuple[Finished, list[int]]:
                shape = TreeShape(nodes=4 + 2 * (number % 6), depth=1 + number % 5, breadth=3)
                async with EdgeRuntime(
                    bundle, link.address, RuntimeOptions(shape=shape, patience=PATIENCE, threads=1)
                ) as runtime:
                    return await answer(runtime, prompt, sampling)

            ends = await asyncio.gather(*(one(n, *job) for n, job in enumerate(jobs)))
            if breaker:
                await breaker
            return ends

    with serve(make_verifier(folders)) as address:
        ends = asyncio.run(run(address))
    for (prompt, sampling), (end, shown) in zip(jobs, ends, strict=True):
        expected = oracle(folders, prompt, sampling)
        assert end.token_ids == expected and shown == expected
        assert end.reason in ("stop", "length")
    if faults:
        assert sum(end.stats.opens for end, _ in ends) > len(jobs), "no link was lost in mid-answer"


def test_another_replica_takes_the_session_over(folders: tuple[Path, Path, Path], bundle: Bundle) -> None:
    """The first verifier vanishes in mid-answer; one that never saw the session finishes it."""
    prompt, sampling = [7, 8, 9, 10], Sampling(temperature=1.0, seed=3)

    async def run(first: str, second: str) -> tuple[Finished, list[int]]:
        screen = Screen()
        async with (
            EmulatedLink(int(first.rsplit(":", 1)[1])) as link,
            EdgeRuntime(bundle, link.address, RuntimeOptions(patience=PATIENCE), pinned=Pinned(mode="tree")) as runtime,
        ):
            async for event in runtime.generate(prompt, max_new_tokens=MAX_NEW, temperature=1.0, seed=3):
                screen.show(event)
                if screen.verified >= 5 and link.upstream_port != int(second.rsplit(":", 1)[1]):
                    link.upstream_port = int(second.rsplit(":", 1)[1])
                    link.cut()
        assert isinstance(event, Finished)
        return event, screen.tokens

    with serve(make_verifier(folders)) as first, serve(make_verifier(folders)) as second:
        end, shown = asyncio.run(run(first, second))
    assert end.token_ids == shown == oracle(folders, prompt, sampling)
    assert end.stats.opens == 2


def test_cancelled_answer_leaves_the_runtime_usable(folders: tuple[Path, Path, Path], bundle: Bundle) -> None:
    prompt = [20, 21, 22]

    async def run(address: str) -> list[int]:
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE)) as runtime:
            stream = runtime.generate(prompt, max_new_tokens=MAX_NEW)
            async for event in stream:
                if isinstance(event, Verified):
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            return (await answer(runtime, prompt, Sampling()))[1]

    with serve(make_verifier(folders)) as address:
        assert asyncio.run(run(address)) == oracle(folders, prompt, Sampling())


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_answer_that_was_left_is_forgotten_too(
    folders: tuple[Path, Path, Path], bundle: Bundle, cancelled: bool
) -> None:
    """What it said so far would be kept a moment later, when it has ended."""

    async def run(address: str) -> None:
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE)) as runtime:
            remembered: list[list[int]] = []
            runtime.drafter.remember = lambda text: remembered.append(list(text))  # type: ignore[method-assign]

            async def leave() -> None:
                async for event in runtime.generate(list(range(20, 50)), max_new_tokens=MAX_NEW):
                    if isinstance(event, Verified) and not cancelled:
                        break
                    if isinstance(event, Verified):
                        task.cancel()

            task = asyncio.create_task(leave())
            await asyncio.wait([task])
            runtime.forget()
            await answer(runtime, [7, 8, 9], Sampling())
            await answer(runtime, [9, 8, 7], Sampling())
            assert [text[:3] for text in remembered] == [[7, 8, 9]]
        runtime.forget()  # closed, and nothing to forget

    with serve(make_verifier(folders)) as address:
        asyncio.run(run(address))


def test_prompts_that_do_not_fit_are_refused(bundle: Bundle) -> None:
    async def run(prompt: list[int]) -> None:
        async with EdgeRuntime(bundle, None) as runtime:
            await answer(runtime, prompt, Sampling())

    for prompt in ([5] * bundle.manifest.max_context, []):
        with pytest.raises(ValueError, match=r"tokens|empty"):
            asyncio.run(run(prompt))
