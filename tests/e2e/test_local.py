"""Target and drafter in one process: the text is plain decoding's, and failures are reported at once."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from edge_runtime.events import Finished, Verified
from edge_runtime.link.events import EngineFailed, LinkRefused
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from outrider.local import LocalVerifier, _read_costs
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.drafting.drafter import TreeShape
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetError, TargetSource
from tests.cloud.drive import in_chunks
from tests.tiny import plain_decode, save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "build/bundle"
#: few tokens, all of them drafted, so that even a random drafter is right at times
VOCAB = 64
MAX_NEW = 30
SAMPLINGS = [Sampling(), Sampling(temperature=0.7, seed=11)]


class Folders:
    """A tiny target in float32, a random drafter for it, and their bundle."""

    def __init__(self, root: Path) -> None:
        self.target, self.drafter, self.bundle = root / "target", root / "drafters" / "tiny", root / "bundle"
        model = tiny_model(seed=5, vocab=VOCAB, dtype=torch.float32)
        save_tiny_drafter(self.drafter, model, save_tiny_target(self.target, model))
        write_bundle(
            BundleOptions(
                target=TargetSource.resolve(str(self.target)),
                drafter=self.drafter,
                output_dir=self.bundle,
                quant="fp32",
            )
        )
        self.model = load_target(TargetSource.resolve(str(self.target)), "float64").model

    def oracle(self, prompt: list[int], sampling: Sampling) -> list[int]:
        return plain_decode(self.model, prompt, sampling, MAX_NEW, max_context=120)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def bundle(folders: Folders) -> Bundle:
    return open_bundle(folders.bundle)


def load(folders: Folders, bundle: Bundle, **settings: Any) -> LocalVerifier:
    """Room for one conversation and a bit; a fixed budget, so that nothing is timed."""
    values = {"max_model_len": 120, "max_nodes": 16, "kv_tokens": 300, "tree_budget": 16}
    local = LocalVerifier.load(
        bundle, str(folders.target), folders.drafter, dtype="float64", threads=1, **{**values, **settings}
    )
    in_chunks(local.verifier, 16)
    return local


def device(bundle: Bundle, server: LocalVerifier, **options: Any) -> EdgeRuntime:
    options = {"shape": TreeShape(nodes=16, depth=4), "threads": 1, **options}
    return EdgeRuntime(bundle, server, RuntimeOptions(**options), Pinned(mode="tree", shaping=False))


async def answer(runtime: EdgeRuntime, prompt: list[int], sampling: Sampling = SAMPLINGS[0]) -> Finished:
    async for event in runtime.generate(
        prompt, max_new_tokens=MAX_NEW, temperature=sampling.temperature, seed=sampling.seed
    ):
        last = event
    assert isinstance(last, Finished)
    return last


def metric(server: LocalVerifier, name: str) -> float:
    return server.verifier.metrics.registry.get_sample_value(f"outrider:{name}") or 0.0


def break_engine(server: LocalVerifier, at_step: int, fault: Callable[[], None]) -> None:
    """Let `fault` happen right before the engine's step number `at_step` from now, once."""
    engine, steps = server.verifier.engine, 0
    step = engine.step

    def faulty(segments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == at_step:
            fault()
        return step(segments)

    engine.step = faulty  # type: ignore[method-assign]


def raises(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_text_is_plain_decodings(folders: Folders, bundle: Bundle, sampling: Sampling) -> None:
    """Several prompts, one after the other and two runtimes at once; drafts are accepted and nothing is provisional."""
    rng = random.Random(3)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(size)] for size in (1, 7, 40, 70)]

    async def run(server: LocalVerifier) -> list[Finished]:
        async with device(bundle, server) as one, device(bundle, server) as two:
            together = await asyncio.gather(answer(one, prompts[0], sampling), answer(two, prompts[1], sampling))
            return [*together, *[await answer(one, prompt, sampling) for prompt in prompts[2:]]]

    with load(folders, bundle) as server:
        ends = asyncio.run(run(server))
    assert not server.verifier.alive
    for prompt, end in zip(prompts, ends, strict=True):
        assert end.token_ids == folders.oracle(prompt, sampling)
        assert end.stats.provisional == end.stats.stalls == 0 and end.stats.opens == 1
        assert end.stats.bytes_up and end.stats.bytes_down
    assert sum(end.stats.rounds for end in ends) < sum(end.stats.tokens for end in ends)


def test_host_sees_no_output_unless_it_configures_logging(
    folders: Folders, bundle: Bundle, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing on stdout, not even of a failed step; the standard logger "cloud" has the events for a host that asks."""

    async def run(server: LocalVerifier) -> None:
        async with device(bundle, server) as runtime:
            await answer(runtime, [5, 6, 7])
            break_engine(server, 2, raises(MemoryError("out of memory")))
            with pytest.raises(EngineFailed):
                await answer(runtime, [8, 9])

    structlog.reset_defaults()  # other tests may have configured it
    with caplog.at_level(logging.INFO, "cloud"), load(folders, bundle) as server:
        asyncio.run(run(server))
    out, err = capfd.readouterr()
    assert out == "" and "session opened" not in err and "Traceback" not in err
    said = [record.getMessage() for record in caplog.records if record.name == "cloud"]
    assert any(text.startswith("session opened") for text in said)
    assert any(record.exc_info for record in caplog.records if record.getMessage().startswith("step failed"))


def test_second_turn_goes_on_where_the_first_ended(folders: Folders, bundle: Bundle) -> None:
    async def run(server: LocalVerifier) -> tuple[list[int], Finished, float]:
        async with device(bundle, server) as runtime:
            first = await answer(runtime, list(range(10, 40)))
            ran = metric(server, "prompt_tokens_total")
            prompt = list(range(10, 40)) + first.token_ids + [50, 51]
            return prompt, await answer(runtime, prompt), metric(server, "prompt_tokens_total") - ran

    with load(folders, bundle) as server:
        prompt, second, ran = asyncio.run(run(server))
    assert second.token_ids == folders.oracle(prompt, Sampling())
    assert 2 <= ran < 10, "the first turn was run again"


def test_an_answer_that_is_asked_for_again_takes_fewer_rounds(folders: Folders, bundle: Bundle) -> None:
    """With others in between, until it is forgotten; without lookup it never does."""
    prompt = list(range(10, 40))

    async def run(server: LocalVerifier, lookup: bool) -> tuple[list[Finished], list[int]]:
        async with device(bundle, server, shape=TreeShape(16, 8), lookup=lookup) as runtime:
            ends = [await answer(runtime, prompt)]
            other = await answer(runtime, [5, 6, 7])
            ends += [await answer(runtime, prompt), await answer(runtime, prompt)]
            runtime.forget()
            ends.append(await answer(runtime, prompt))
            return ends, other.token_ids

    with load(folders, bundle) as server:
        ends, other = asyncio.run(run(server, True))
    assert all(end.token_ids == folders.oracle(prompt, Sampling()) for end in ends)
    assert other == folders.oracle([5, 6, 7], Sampling())
    first, again, once_more, forgotten = [end.stats.rounds for end in ends]
    assert max(again, once_more) < first == forgotten
    with load(folders, bundle) as server:
        ends, _ = asyncio.run(run(server, False))
    assert len({end.stats.rounds for end in ends}) == 1


def test_trees_stay_within_the_published_budget(folders: Folders, bundle: Bundle) -> None:
    async def run(server: LocalVerifier) -> Finished:
        async with device(bundle, server) as runtime:
            return await answer(runtime, [5, 6, 7])

    with load(folders, bundle, tree_budget=3) as server:
        end = asyncio.run(run(server))
    assert end.token_ids == folders.oracle([5, 6, 7], Sampling())
    assert end.stats.rounds > 1 and end.stats.nodes <= 16 + 3 * (end.stats.rounds - 1)  # the first was drafted before


def test_cancelled_answer_leaves_all_usable(folders: Folders, bundle: Bundle) -> None:
    async def run(server: LocalVerifier) -> list[int]:
        async with device(bundle, server) as runtime:
            stream = runtime.generate([20, 21, 22], max_new_tokens=MAX_NEW)
            async for event in stream:
                if isinstance(event, Verified):
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            return (await answer(runtime, [20, 21, 22])).token_ids

    with load(folders, bundle) as server:
        assert asyncio.run(run(server)) == folders.oracle([20, 21, 22], Sampling())
        assert metric(server, "num_requests_waiting") == 0


def test_slow_target_is_waited_for(folders: Folders, bundle: Bundle) -> None:
    """A verdict that a device far away would give up on: nobody writes alone beside a target that is at work."""

    async def run(server: LocalVerifier) -> Finished:
        async with device(bundle, server) as runtime:
            return await answer(runtime, [5, 6, 7])

    with load(folders, bundle) as server:
        break_engine(server, 6, lambda: time.sleep(1.0))
        end = asyncio.run(run(server))
    assert end.token_ids == folders.oracle([5, 6, 7], Sampling())
    assert end.stats.seconds > 1.0 and end.stats.stalls == end.stats.provisional == 0


def test_dropped_link_comes_back(folders: Folders, bundle: Bundle) -> None:
    async def run(server: LocalVerifier) -> Finished:
        async with device(bundle, server) as runtime:
            async for event in runtime.generate([5, 6, 7], max_new_tokens=MAX_NEW):
                if isinstance(event, Verified) and runtime.link and runtime.link.welcome and event.tokens:
                    drops.append(len(event.tokens))
                    if len(drops) == 2:
                        runtime.link.renew()
            assert isinstance(event, Finished)
            return event

    drops: list[int] = []
    with load(folders, bundle) as server:
        end = asyncio.run(run(server))
    assert end.token_ids == folders.oracle([5, 6, 7], Sampling()) and end.stats.opens == 2


def test_failed_step_ends_the_answer_with_an_error(folders: Folders, bundle: Bundle) -> None:
    """The next answer is as if nothing had been."""

    async def run(server: LocalVerifier) -> list[int]:
        async with device(bundle, server) as runtime:
            break_engine(server, 4, raises(MemoryError("no room for this step")))
            with pytest.raises(EngineFailed, match="log"):
                await answer(runtime, [5, 6, 7])
            return (await answer(runtime, [5, 6, 7])).token_ids

    with load(folders, bundle) as server:
        assert asyncio.run(run(server)) == folders.oracle([5, 6, 7], Sampling())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_engine_thread_is_an_error(folders: Folders, bundle: Bundle) -> None:
    async def run(server: LocalVerifier) -> None:
        async with device(bundle, server) as runtime:
            break_engine(server, 4, raises(SystemExit()))  # not an Exception: the thread ends
            for _ in range(2):
                with pytest.raises(EngineFailed, match="thread"):
                    async with asyncio.timeout(20):
                        await answer(runtime, [5, 6, 7])

    with load(folders, bundle) as server:
        asyncio.run(run(server))
        with pytest.raises(EngineFailed, match="with"):
            device(bundle, server)


def test_loop_that_ends_in_mid_step_leaves_the_engine_alive(folders: Folders, bundle: Bundle) -> None:
    """A reply to nobody must not end the engine thread."""
    at_work, go_on = threading.Event(), threading.Event()

    def fault() -> None:
        at_work.set()
        assert go_on.wait(HANG)

    async def leave(server: LocalVerifier) -> None:
        async with device(bundle, server) as runtime:
            task = asyncio.create_task(answer(runtime, [5, 6, 7]))
            assert await asyncio.to_thread(at_work.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def run(server: LocalVerifier) -> Finished:
        async with device(bundle, server) as runtime:
            return await answer(runtime, [8, 9])

    with load(folders, bundle) as server:
        break_engine(server, 4, fault)
        asyncio.run(leave(server))
        go_on.set()
        assert asyncio.run(run(server)).token_ids == folders.oracle([8, 9], Sampling())


def test_another_drafters_bundle_is_refused(folders: Folders, bundle: Bundle, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny_drafter(other, folders.model, bundle.manifest.target_hash, torch.arange(1, 65) % VOCAB)

    async def run(server: LocalVerifier) -> None:
        async with device(bundle, server) as runtime:
            await answer(runtime, [5])

    with (
        LocalVerifier.load(bundle, str(folders.target), other, threads=1, tree_budget=4) as server,
        pytest.raises(LinkRefused, match=r"drafter is .*, here "),
    ):
        asyncio.run(run(server))


def command(folder: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m edge_runtime` in `folder`; `before` is run in its interpreter first."""
    program = f"import sys; {before}\nfrom outrider.cli.device import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=HANG,
        env={**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)},
    )


def test_command_finds_target_and_drafter_by_the_bundle(folders: Folders) -> None:
    """Run where drafters/ is; only the answer is on stdout, nothing on stderr but the answer as it grew."""
    arguments = ("--bundle", "bundle", "--dtype", "float64", "--max-tokens", str(MAX_NEW))
    done = command(folders.bundle.parent, "generate", "--local", *arguments, "--json", "w20 w21 w22")
    assert done.returncode == 0, done.stderr
    end = json.loads(done.stdout)
    prompt = open_bundle(folders.bundle).render_chat([{"role": "user", "content": "w20 w21 w22"}])
    assert end["token_ids"] == folders.oracle(prompt, Sampling()) and end["provisional"] == 0
    assert "session opened" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "before", "status", "text"),
    [
        (["--local", "--server", "127.0.0.1:1"], "", 2, "argument --server: not allowed with argument --local"),
        (["--model", "x"], "", 2, "--model configures --local; give --local too"),
        (
            ["--local"],
            "sys.modules['onnx'] = sys.modules['filelock'] = sys.modules['structlog'] = None",
            1,
            "needs structlog; run: pip install 'outrider[local]'",
        ),
        (["--local", "--dtype", "float32"], "sys.modules['torch'] = None", 1, "run: pip install 'outrider[torch]'"),
        (["--local", "--model", "/nowhere"], "", 1, "/nowhere: no such folder"),
        (["--local", "--drafter", "/nowhere"], "", 1, "so this is not a drafter folder"),
    ],
)
def test_command_says_what_is_wrong(
    folders: Folders, arguments: list[str], before: str, status: int, text: str
) -> None:
    done = command(folders.bundle.parent, "generate", "--bundle", "bundle", *arguments, "hello", before=before)
    assert done.returncode == status and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert text in last and "Traceback" not in done.stderr
    assert status == 2 or (last.startswith("error: ") and len(done.stderr.splitlines()) == 1)


def test_settings_of_a_served_verifier_do_not_reach_this_one(
    folders: Folders, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address, tokens and certificate are of no use here; what is wrong elsewhere is one line with its origin."""
    served = {"HOST": "0.0.0.0", "PORT": "tcp://10.0.0.7:8765", "AUTH_FILE": "/nowhere", "SSL_CERTFILE": "/nowhere"}
    for name, value in served.items():
        monkeypatch.setenv(f"VERIFIER_{name}", value)
    with LocalVerifier.load(bundle, str(folders.target), folders.drafter, threads=1, tree_budget=4) as server:
        assert server.verifier.alive
    monkeypatch.setenv("VERIFIER_MAX_NODES", "many")
    with pytest.raises(
        TargetError, match=r"--max-nodes: .* \(the environment has VERIFIER_MAX_NODES=many\)"
    ) as refused:
        LocalVerifier.load(bundle, str(folders.target), folders.drafter, threads=1, tree_budget=4)
    assert len(str(refused.value).splitlines()) == 1


def test_what_steps_cost_is_kept_between_starts(
    folders: Folders, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is damaged, or cannot be written, is as none."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with load(folders, bundle, tree_budget=0) as first:
        pass
    [kept] = tmp_path.glob("step-costs/*.json")
    with monkeypatch.context() as patch:
        patch.setattr("cloud.server.service.measure_costs", lambda *_, **__: pytest.fail("timed again"))
        second = load(folders, bundle, tree_budget=0)
    assert second.verifier.scheduler.budget.costs == first.verifier.scheduler.budget.costs is not None
    kept.write_text("{}")
    assert load(folders, bundle, tree_budget=0).verifier.scheduler.budget.costs is not None
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.write_text("a file")
    with load(folders, bundle, tree_budget=0):
        pass


@pytest.mark.parametrize(
    ("curve", "more"),
    [
        ('"tokens": [], "seconds": []', ""),
        ('"tokens": [1, 4], "seconds": [0.1]', ""),
        ('"tokens": [4, 1], "seconds": [0.1, 0.2]', ""),
        ('"tokens": [1, 1], "seconds": [0.1, 0.2]', ""),
        ('"tokens": [-4, 1], "seconds": [0.1, 0.2]', ""),
        ('"tokens": [1, 99999999999999999999], "seconds": [0.1, 0.2]', ""),
        ('"tokens": [1, 4], "seconds": [0, 0]', ""),
        ('"tokens": [1, 4], "seconds": [-0.1, 0.2]', ""),
        ('"tokens": [1, 4], "seconds": [0.2, 0.1]', ""),
        ('"tokens": [1, 4], "seconds": [1e308, 1e308]', ""),
        ('"tokens": [1, 4], "seconds": [NaN, 0.1]', ""),
        ('"tokens": [1, 4], "seconds": [0.1, 0.2]', ', "session": -1'),
        ('"tokens": [1, 4], "seconds": [0.1, 0.2]', ', "token_context": 1e308'),
        ('"tokens": [1, 4], "seconds": [0.1, 0.2]', ', "x": ' + "[" * 100_000),
    ],
)
def test_step_costs_that_cannot_be_are_timed_again(curve: str, more: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(f'{{"curve": {{{curve}}}{more}}}')
    assert _read_costs(file) is None
    file.write_text('{"curve": {"tokens": [1, 4], "seconds": [0.1, 0.1]}}')
    assert _read_costs(file) is not None
