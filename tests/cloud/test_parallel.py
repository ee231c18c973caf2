"""Tensor parallelism over two real processes (gloo): the same tokens as plain decoding, and the command itself."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from cloud.torch_engine.parallel import Forward, Gather, Stop, _decoder
from outrider_core.protocol.rows import RowShape, unpack_rows
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Hello
from tests.cloud.drive import Client, reference_rows
from tests.cloud.ranks import SAMPLINGS
from tests.device import TOO_FEW
from tests.tiny import FAMILIES, plain_decode, save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
alone = pytest.mark.skipif(TOO_FEW, reason="two ranks need two CUDA devices")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@alone
def test_two_ranks_decode_like_one(tmp_path: Path) -> None:
    models = {family: tiny_model(family, seed=5, layers=2) for family in FAMILIES}
    rng = random.Random(3)
    truths = {}
    for family, model in models.items():
        save_tiny_target(tmp_path / family, model)
        talks = []
        for index in range(4):
            prompt = [rng.randrange(4, 199) for _ in range((3, 75, 21, 4)[index])]
            if index == 3:
                prompt = talks[1]["prompt"][:70] + prompt  # a shared prefix
            # ranks.py verifies six times, at most six tokens each, and looks as far ahead again
            truth = plain_decode(model, prompt, SAMPLINGS[index % 3], 46, eos_ids=())
            talks.append({"prompt": prompt, "sampling": index % 3, "truth": truth})
        truths[family] = talks
        (tmp_path / f"{family}.json").write_text(json.dumps(talks))
    result = subprocess.run(
        [*TORCHRUN, "-m", "tests.cloud.ranks", str(tmp_path), *FAMILIES],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [line["family"] for line in lines] == list(FAMILIES)
    for line in lines:
        model, talks = models[line["family"]], truths[line["family"]]
        assert line["rows"] == 1  # each rank holds one of the two KV heads
        assert line["evicted"] > 0 and line["shared"] > 0
        assert line["joined"]
        assert set(line["commands"]) == {"Forward", "Stop"}  # one command a step
        for text, talk in zip(line["texts"], talks, strict=True):
            assert len(text) >= len(talk["prompt"]) + 6
            assert text == (talk["prompt"] + talk["truth"])[: len(text)]
        shape = RowShape(2, 8)
        want = unpack_rows(reference_rows(model, line["texts"][0]), shape)
        got = unpack_rows(bytes.fromhex(line["features"]), shape)
        step = abs(want).max(-1, keepdims=True) / 127 * 1.01 + 1e-6
        assert len(got) == len(want) - 1 and (abs(got - want[:-1]) <= step[:-1]).all()


@pytest.mark.slow
@alone
def test_the_command_serves_with_two_ranks(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    target_hash = save_tiny_target(tmp_path / "target", model)
    save_tiny_drafter(tmp_path / "drafter", model, target_hash)
    process = subprocess.Popen(
        [
            *TORCHRUN,
            "-m",
            "cloud.verifier",
            "--tensor-parallel-size",
            "2",
            "--model",
            str(tmp_path / "target"),
            "--drafter",
            str(tmp_path / "drafter"),
            "--port",
            "0",
            "--max-model-len",
            "64",
            "--kv-tokens",
            "512",
            "--max-nodes",
            "16",
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("verifier ready: ws://"), line
        address = line.split("//")[1].split("/")[0]
        drafter_hash = line.split("drafter=")[1].split()[0]
        with Client(address, Hello(1, target_hash, drafter_hash)) as client:
            client.open([5, 6, 7])
            truth = plain_decode(model, [5, 6, 7], Sampling(), 8, eos_ids=())
            assert client.verify(1, 3, TokenTree.chain(truth[:3])).bonus == truth[3]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG)
    finally:
        process.kill()
        process.communicate()


def test_wrong_number_of_ranks(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cloud.verifier", "--tensor-parallel-size", "2", "--port", "0"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 2 and "torchrun --nproc-per-node 2" in result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "command",
    [
        Forward(
            [([3, 5], [2, 3])], [(0, 256, [1, 2], [3, 4, 5], [-1, 0, 0], True), (512, 0, [7], [], [], False)], [0, 2]
        ),
        Gather([([8], [7])], [0, 2], [9, 10]),
        Stop(),
    ],
)
def test_commands_travel_as_they_are(command: Forward | Gather | Stop) -> None:
    assert _decoder.decode(msgspec.msgpack.encode(command)) == command
