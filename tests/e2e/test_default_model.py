"""The default model, real processes, real sockets, real faults."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.baseline import plain_decode
from benchmarks.links import EmulatedLink
from edge_runtime.events import Finished, Provisional, RolledBack, Verified
from edge_runtime.options import Pinned
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.timeouts import Patience
from export.bundle.verifier_process import VerifierProcess
from outrider_core.drafting.bundle import open_bundle
from outrider_core.protocol.sampling import Sampling
from tests.e2e.conftest import BUNDLE, ROOT, needs_default_bundle
from tests.waiting import HANG

QUESTIONS = [
    "Name three uses of copper and explain one of them.",
    "Write two sentences about the sea in winter.",
    "A train travels 60 km in 45 minutes. How fast is it?",
]
FAULTS = ("kill", "reset", "silence")
#: seconds by which the first provisional token may come after the verdict was due (95 % of cuts)
STALL_BOUND = 0.5

pytestmark = needs_default_bundle


async def follow(runtime: EdgeRuntime, question: str | list[int], max_new: int, **sampling: float | int) -> Finished:
    async for event in runtime.generate(question, max_new_tokens=max_new, **sampling):  # type: ignore[arg-type]
        last = event
    assert isinstance(last, Finished)
    return last


def test_greedy_output_is_the_targets_own(verifier: VerifierProcess, oracle: VerifierProcess) -> None:
    """fp32, token for token, several questions and two of them at the same time."""

    async def run() -> None:
        bundle = open_bundle(BUNDLE)
        async with (
            EdgeRuntime(bundle, verifier.address, pinned=Pinned(mode="tree")) as one,
            EdgeRuntime(bundle, verifier.address, pinned=Pinned(mode="tree")) as two,
        ):
            prompts = [one.encode_prompt(question) for question in QUESTIONS]
            together = await asyncio.gather(follow(one, prompts[0], 48), follow(two, prompts[1], 48))
            answers = [*together, await follow(one, prompts[2], 48)]
            plain = await plain_decode(oracle.address, bundle, prompts, Sampling(), 48)
        for answer, expected in zip(answers, plain, strict=True):
            assert answer.token_ids == expected.tokens
            assert answer.verified == one.decode(expected.tokens) and not answer.provisional
        assert sum(a.stats.rounds for a in answers) < sum(a.stats.tokens for a in answers)

    asyncio.run(run())


def test_seeded_sampling_equals_plain_decoding(verifier: VerifierProcess, oracle: VerifierProcess) -> None:
    async def run() -> None:
        bundle = open_bundle(BUNDLE)
        async with EdgeRuntime(bundle, verifier.address) as runtime:
            prompt = runtime.encode_prompt(QUESTIONS[1])
            sampling = Sampling(temperature=0.7, top_p=0.95, seed=1234)
            answer = await follow(runtime, prompt, 40, temperature=0.7, top_p=0.95, seed=1234)
            (plain,) = await plain_decode(oracle.address, bundle, [prompt], sampling, 40)
        assert answer.token_ids == plain.tokens

    asyncio.run(run())


def test_a_stream_in_fewer_steps_is_the_same(verifier: VerifierProcess, oracle: VerifierProcess) -> None:
    """Where the text repeats its prompt a step brings several tokens, each of them the target's own."""

    async def run() -> None:
        bundle = open_bundle(BUNDLE)
        samplings = (Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=11))
        async with EdgeRuntime(bundle, verifier.address, pinned=Pinned(mode="stream")) as runtime:
            prompt = runtime.encode_prompt(
                "Copy these words three times: the slow red fox sleeps under the old oak tree."
            )
        for sampling in samplings:
            (plain,) = await plain_decode(oracle.address, bundle, [prompt], sampling, 96)
            (fewer,) = await plain_decode(verifier.address, bundle, [prompt], sampling, 96)
            assert fewer.tokens == plain.tokens

    asyncio.run(run())
    lines = httpx.get(f"http://{verifier.address}/metrics").text.splitlines()
    name = "outrider:stream_lookup_accepted_tokens_total "
    assert sum(float(line.removeprefix(name)) for line in lines if line.startswith(name)) > 10


async def answer_with_cut(
    runtime: EdgeRuntime, link: EmulatedLink, verifier: VerifierProcess, fault: str, prompt: list[int], after: int,
    alone: int, max_new: int,
) -> tuple[Finished, list[int]]:  # fmt: skip
    """One answer with one fault after `after` verified tokens, healed after `alone` provisional ones.

    Returns the end and the tokens as a user would have collected them from the events.
    """
    shown: list[int] = []
    verified = provisional = 0
    broken = healed = False
    async for event in runtime.generate(prompt, max_new_tokens=max_new):
        if isinstance(event, Verified):
            shown[verified:] = event.tokens + shown[verified + len(event.tokens) :]
            verified += len(event.tokens)
        if isinstance(event, Provisional):
            shown.append(event.token)
            provisional += 1
        if isinstance(event, RolledBack):
            del shown[len(shown) - event.count :]
        if verified >= after and not broken:
            broken = True
            if fault == "kill":
                verifier.kill()
            elif fault == "reset":
                link.cut()
            else:
                link.silent = True
        ended = bool(shown) and (shown[-1] in runtime.bundle.manifest.eos_ids or len(shown) >= max_new)
        if broken and not healed and (provisional >= alone or ended):
            healed = True
            link.silent = False
            if fault == "kill":
                verifier.start()
                await asyncio.to_thread(verifier.wait_ready)
    assert isinstance(event, Finished)
    return event, shown


def cuts(verifier: VerifierProcess, oracle: VerifierProcess, count: int, seed: int) -> None:
    rng = random.Random(seed)
    max_new = 64
    figures = []

    async def run() -> None:
        bundle = open_bundle(BUNDLE)
        async with EmulatedLink(verifier.port) as link, EdgeRuntime(bundle, link.address) as runtime:
            prompts = [runtime.encode_prompt(question) for question in QUESTIONS]
            plain = await plain_decode(oracle.address, bundle, prompts, Sampling(), max_new)
            for number in range(count):
                which = rng.randrange(len(prompts))
                expected = plain[which].tokens
                after, alone = rng.randrange(1, max(2, len(expected) - 8)), rng.randrange(1, 20)
                fault = FAULTS[number % len(FAULTS)]
                end, shown = await answer_with_cut(
                    runtime, link, verifier, fault, prompts[which], after, alone, max_new
                )
                assert end.token_ids == expected, f"cut {number}: {fault} after {after}"
                assert shown == expected, f"cut {number}: the events do not add up to the text"
                stats = end.stats
                assert stats.provisional == stats.kept + stats.rolled_back
                figures.append({"fault": fault, "after": after, **stats.as_dict()})

    asyncio.run(run())
    stalls = sorted(stall for figure in figures for stall in figure["stall_seconds"])
    assert stalls, "no cut was noticed at all"
    p95 = stalls[min(len(stalls) - 1, int(len(stalls) * 0.95))]
    summary = {
        "cuts": count,
        "stalls": len(stalls),
        "stall_p95_ms": round(p95 * 1e3, 1),
        "stall_max_ms": round(stalls[-1] * 1e3, 1),
        "provisional": sum(f["provisional"] for f in figures),
        "kept": sum(f["kept"] for f in figures),
        "rolled_back": sum(f["rolled_back"] for f in figures),
    }
    print(json.dumps(summary))
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / f"build/cuts-{count}.json").write_text(json.dumps({**summary, "answers": figures}, indent=2) + "\n")
    assert p95 <= STALL_BOUND


def test_a_cut_loses_nothing(verifier: VerifierProcess, oracle: VerifierProcess) -> None:
    cuts(verifier, oracle, 1, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_cuts_lose_nothing(verifier: VerifierProcess, oracle: VerifierProcess) -> None:
    cuts(verifier, oracle, 20, seed=2)


def test_chat_goes_on_where_it_was(verifier: VerifierProcess, oracle: VerifierProcess) -> None:
    """The second turn reuses the session: its text equals plain decoding of the whole conversation."""

    async def run() -> None:
        bundle = open_bundle(BUNDLE)
        async with EdgeRuntime(bundle, verifier.address) as runtime:
            messages = [{"role": "user", "content": QUESTIONS[1]}]
            first = await follow(runtime, messages, 24)  # type: ignore[arg-type]
            messages += [
                {"role": "assistant", "content": first.verified},
                {"role": "user", "content": "Shorter, please."},
            ]
            prompt = runtime.encode_prompt(messages)
            second = await follow(runtime, prompt, 24)
            (plain,) = await plain_decode(oracle.address, bundle, [prompt], Sampling(), 24)
        assert second.token_ids == plain.tokens

    asyncio.run(run())


def test_many_conversations_on_one_connection(verifier: VerifierProcess) -> None:
    """More than the verifier's limit of open streams: each finished conversation is closed."""

    async def run() -> None:
        async with EdgeRuntime.from_bundle(BUNDLE, verifier.address) as runtime:
            for number in range(20):
                end = await follow(runtime, f"Say the number {number}.", 1)
                assert end.stats.tokens == 1 and end.stats.stalls == 0

    asyncio.run(run())


def test_offline_from_the_start_writes_unverified_text() -> None:
    async def run() -> None:
        async with EdgeRuntime.from_bundle(BUNDLE) as runtime:
            events = [event async for event in runtime.generate(QUESTIONS[1], max_new_tokens=12)]
        end = events[-1]
        assert isinstance(end, Finished) and end.reason == ("length" if len(end.token_ids) == 12 else "stop")
        assert not end.verified and end.provisional and 0 < len(end.token_ids) <= 12

    asyncio.run(run())


def test_another_drafters_verifier_is_refused(verifier: VerifierProcess, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(BUNDLE, folder)
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    drafter_hash = json.loads(text)["drafter_hash"]
    manifest.write_text(text.replace(drafter_hash, "0" * 16))

    async def run() -> Finished:
        patience = Patience(connect=0.2, offline=60.0)
        async with EdgeRuntime.from_bundle(folder, verifier.address, patience=patience) as runtime:
            *_, last = [event async for event in runtime.generate(QUESTIONS[0], max_new_tokens=8)]
            assert runtime.link_refused and isinstance(last, Finished)
            return last

    last = asyncio.run(run())
    assert last.reason == "length" and last.provisional and not last.verified and "drafter" in last.detail


def test_command_line_answers_and_fails_clearly(verifier: VerifierProcess) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "edge_runtime", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=HANG,
            env={**os.environ, "COLUMNS": "100"},
        )  # fmt: skip

    good = command(
        "generate", "--bundle", str(BUNDLE), "--server", verifier.address, "--json", "--max-tokens", "8",
        "What is the capital of Japan?",
    )  # fmt: skip
    assert good.returncode == 0, good.stderr
    assert "Tokyo" in json.loads(good.stdout)["text"]
    bad = command("generate", "--bundle", "/nonexistent", "hello")
    assert bad.returncode == 1 and bad.stderr.startswith("error: ") and len(bad.stderr.splitlines()) == 1


def test_chat_answers_line_by_line(verifier: VerifierProcess) -> None:
    command = [sys.executable, "-m", "edge_runtime", "chat", "--bundle", str(BUNDLE), "--server", verifier.address]
    done = subprocess.run(
        [*command, "--max-tokens", "8"], input="What is the capital of Japan?\nAnd of Italy?\n\n", text=True,
        capture_output=True, cwd=ROOT, timeout=HANG,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout and done.stderr.count("verified tokens") == 2
