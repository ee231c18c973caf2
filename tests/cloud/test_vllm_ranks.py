"""Tensor parallelism by vLLM's own workers, two processes on the CPU: the same tokens and rows as of one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from cloud.http_server import EXIT_BROKEN
from edge_runtime.events import Provisional, Verified
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from outrider_core.drafting.bundle import open_bundle
from outrider_core.protocol.constraint import Constraint, Rules, pack_bias
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Verdict
from outrider_core.targets.part import Part
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import FOR_VLLM, Direct, assert_rows, make_verifier, random_tree, started
from tests.cloud.running import PROMPT, Running, running, save_folder
from tests.tiny import plain_decode, save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SAMPLINGS = [Sampling(), Sampling(temperature=0.7, seed=1), Sampling(temperature=1.0, top_p=0.9, seed=2)]


def test_two_ranks_decode_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sessions than the pool holds, a shared prefix, a constraint, chances; a step is one command."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = tiny_model("qwen2", seed=5, **FOR_VLLM)
    values = {"kv_tokens": 256, "tensor_parallel_size": 2, "prefix_cache": "on"}
    verifier = make_verifier(model, (), engine="vllm", **values)
    runner: Any = verifier.engine.runner
    workers, commands = runner._executor._workers, Counter[str]()
    call = workers.collective_rpc
    workers.collective_rpc = lambda name, **more: (commands.update([name]), call(name, **more))[1]
    rng, prompts = random.Random(3), list[list[int]]()
    for index, length in enumerate((3, 75, 21, 4)):
        prompts.append([rng.randrange(4, 199) for _ in range(length)])
        if index == 3:
            prompts[3] = prompts[1][:70] + prompts[3]
    truths = [plain_decode(model, prompt, SAMPLINGS[at % 3], 46, eos_ids=()) for at, prompt in enumerate(prompts)]
    held = Constraint(3, 0.9, 0.4, *pack_bias({60: 3.0, 99: -5.0}))
    ruled = plain_decode(model, PROMPT, SAMPLINGS[1], 12, eos_ids=(), rules=Rules(held))
    joins_rows(runner, verifier.features.layers)
    with started(verifier) as direct:
        texts, evicted = drive(direct, prompts, truths)
        for text, prompt, truth in zip(texts, prompts, truths, strict=True):
            assert len(text) >= len(prompt) + 6 and text == [*prompt, *truth][: len(text)]
        assert evicted and verifier.metrics.registry.get_sample_value("outrider:prefix_cache_hits_total")
        assert (
            set(commands) == {"outrider_step"}
            and commands.total() == verifier.metrics.registry.get_sample_value("outrider:step_seconds_count") + 3
        ), (commands, "a step is one command")
        session = os.urandom(16)
        direct.open(session, PROMPT, 0, SAMPLINGS[1], rules=Rules(held))
        verdict = direct.verify(session, 1, 3, TokenTree.chain(ruled[:4])).get(timeout=HANG)
        assert isinstance(verdict, Verdict) and verdict.bonus == ruled[4] and commands["outrider_draw"] >= 1
        _, features = direct.open(os.urandom(16), prompts[0])
        assert_rows(model, verifier, prompts[0], 0, features.block(0, len(prompts[0]) - 1))
        logits = runner.forward([Part(0, 0, tuple(PROMPT))])
        ((_, *rest),) = logits.chances([0], [7], 4)
        want = model(input_ids=torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1).numpy()
        assert np.allclose([chance for _, chance in rest], np.sort(want)[::-1][:4], atol=1e-4)


def joins_rows(runner: Any, layers: tuple[int, ...]) -> None:
    """Rows of the last step, moved ones and those of an earlier step are all found, with every head."""
    runner.forward([Part(0, 0, (5, 6, 7), TokenTree.chain((8, 9)), True, Sampling())])
    fresh = runner.gather(layers, range(5))
    runner.move([4], [3])
    moved = runner.gather(layers, [3, 0])
    runner.forward([Part(128, 0, (5,), TokenTree(), True, Sampling())])
    earlier = runner.gather(layers, [128, 3, 1])
    assert fresh.shape == (5, len(layers), 2 * 2 * 32)
    assert torch.equal(moved, fresh[[4, 0]]) and torch.equal(earlier[1:], fresh[[4, 1]])


def drive(direct: Direct, prompts: list[list[int]], truths: list[list[int]]) -> tuple[list[list[int]], int]:
    """Several sessions in turn; their texts, and how often their rows were evicted."""
    rng, evicted, pool = random.Random(0), 0, direct.verifier.engine.pool
    ids, texts = [os.urandom(16) for _ in prompts], [list(prompt) for prompt in prompts]
    for at, session in enumerate(ids):
        direct.open(session, texts[at], 0, SAMPLINGS[at % 3])
    for seq in range(1, 7):
        waiting = []
        for at, session in enumerate(ids):
            evicted += pool.used(session) == 0
            tree = random_tree(rng, truths[at][len(texts[at]) - len(prompts[at]) :], direct.verifier.vocab_size)
            waiting.append((tree, direct.verify(session, seq, len(texts[at]), tree)))
        for text, (tree, replies) in zip(texts, waiting, strict=True):
            verdict = replies.get(timeout=HANG)
            assert isinstance(verdict, Verdict), verdict
            text += [*(tree.tokens[node] for node in verdict.accepted), verdict.bonus]
    return texts, evicted


def test_the_command_serves_with_two_ranks_and_ends_them(tmp_path: Path) -> None:
    folder, model = save_folder(tmp_path, **FOR_VLLM), tiny_model(**FOR_VLLM)
    truth = plain_decode(model, PROMPT, Sampling(), 8, eos_ids=())
    flags = ["--engine", "vllm", "--tensor-parallel-size", "2", "--tree-budget", "8"]
    with running(folder, *flags) as server:
        with server.client() as client:
            client.open(PROMPT)
            assert client.verify(1, 3, TokenTree.chain(truth[:3])).bonus == truth[3]
        ranks = ranks_of(server)
        server.process.send_signal(signal.SIGTERM)
        server.process.communicate(timeout=HANG)
        assert server.process.returncode == 0 and not still_there(ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_verifier_and_the_device_writes_on(tmp_path: Path, rank: int) -> None:
    """In the middle of an answer: the process ends as broken, within seconds, and the other rank with it."""
    model, bundle = tiny_model(**FOR_VLLM), tmp_path / "bundle"
    truth = plain_decode(model, [1, *PROMPT, 3], Sampling(), 90, eos_ids=())
    unused = next(token for token in range(4, 199) if token not in truth)  # so that the answer is long
    model.config.eos_token_id = model.generation_config.eos_token_id = unused
    (tmp_path / "hash").write_text(save_tiny_target(tmp_path / "target", model))
    save_tiny_drafter(tmp_path / "drafter", model, (tmp_path / "hash").read_text())
    target = TargetSource.resolve(str(tmp_path / "target"))
    options = BundleOptions(target=target, drafter=tmp_path / "drafter", output_dir=bundle, compare=False)
    write_bundle(options, Console(quiet=True))
    flags = ["--engine", "vllm", "--tensor-parallel-size", "2", "--tree-budget", "8", "--shutdown-timeout", "1"]

    async def write(server: Running, ranks: list[int]) -> tuple[int, int]:
        verified = alone = 0
        device = RuntimeOptions(policy=Policy(offline_rate=1000))
        async with EdgeRuntime(open_bundle(bundle), server.address, device) as runtime:
            async for event in runtime.generate("w5 w6 w7", max_new_tokens=90):
                if isinstance(event, Verified):
                    verified += len(event.tokens)
                    if verified > 2 and not alone:
                        os.kill(ranks[rank], signal.SIGKILL)
                alone += isinstance(event, Provisional)
                if alone >= 3:
                    break
        return verified, alone

    with running(tmp_path, *flags) as server:
        ranks = ranks_of(server)
        verified, alone = asyncio.run(write(server, ranks))
        assert verified > 2 and alone >= 3
        server.process.communicate(timeout=HANG)
        assert server.process.returncode == EXIT_BROKEN and not still_there(ranks)


def ranks_of(server: Running) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    ranks = [int(each) for each in children if "resource_tracker" not in Path(f"/proc/{each}/cmdline").read_text()]
    assert len(ranks) == 2, children
    return ranks


def still_there(ranks: list[int]) -> list[int]:
    return [each for each in ranks if Path(f"/proc/{each}/exe").exists()]
