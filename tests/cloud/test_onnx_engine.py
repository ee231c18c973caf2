"""The verifier over a lowered target: the same text in any tree, batch, chunking, after eviction and resume."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from cloud.onnx_engine.bundles import find_bundle
from cloud.onnx_engine.features import HostFeatures
from cloud.onnx_engine.loading import load_model, onnx_model
from cloud.service import Verifier
from cloud.settings import Settings
from outrider_core.models.identity import model_identity
from outrider_core.models.moa import server_half
from outrider_core.models.moa_config import DrafterError
from outrider_core.models.target import TargetError
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Verdict
from outrider_core.targets.bundle import TargetBundle
from tests.cloud.drive import random_tree, started
from tests.models.odd_moa import ODD, random_moa, random_sequence
from tests.targets.plain import lowered, plain_decode_8bit
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_drafter_config, tiny_model

SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.0, top_p=0.9, seed=4)]


def test_feature_rows_are_those_of_the_server_half() -> None:
    moa = random_moa(dtype=torch.float32)
    _, kv = random_sequence(ODD, 7, 1, torch.float32)
    positions = [3, 4, 5, 90, 6, 0, 1]
    want = server_half(ODD, moa.trained())(kv, torch.tensor(positions)).numpy()
    ours = HostFeatures(ODD, {name: tensor.numpy() for name, tensor in moa.trained().items()})
    np.testing.assert_allclose(ours.rows(kv.numpy(), positions), want, rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetBundle, object]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(request.param, hidden=64, dtype=torch.float32)
    return lowered(model, folder), model


def test_many_sessions_with_evictions(bundle: tuple[TargetBundle, object]) -> None:
    made, model = bundle
    config, tensors = tiny_drafter_config(model)
    settings = Settings(max_context=128, max_nodes=24, kv_tokens=384, prefill_chunk=5, tree_budget=8, threads=1)
    arrays = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    verifier = Verifier(onnx_model(made, config, arrays, "tiny", settings), settings)
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 199) for _ in range(rng.randrange(3, 30))] for _ in range(5)]
    truths = [[*prompt, *plain_decode_8bit(made, prompt, SAMPLINGS[i % 3], 30)] for i, prompt in enumerate(prompts)]
    with started(verifier) as direct:
        ids = [os.urandom(16) for _ in prompts]
        texts = [list(prompt) for prompt in prompts]
        for index, prompt in enumerate(prompts):
            direct.open(ids[index], prompt, 0, SAMPLINGS[index % 3])
        for seq in range(1, 6):
            waiting = []
            for index, text in enumerate(texts):
                tree = random_tree(rng, truths[index][len(text) :], made.config.vocab_size)
                waiting.append((text, tree, direct.verify(ids[index], seq, len(text), tree)))
            for text, tree, replies in waiting:
                verdict = replies.get(timeout=60)
                assert isinstance(verdict, Verdict), verdict
                text += [tree.tokens[node] for node in verdict.accepted] + [verdict.bonus]
        for index, text in enumerate(texts):
            common = min(len(text), len(truths[index]))
            assert text[:common] == truths[index][:common] and common >= len(prompts[index]) + 5
        assert verifier.engine.pool.evictions > 0


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not supported, and a bundle in the cache that was damaged."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    source, drafter = tmp_path / "source", tmp_path / "drafter"
    settings = Settings(engine="onnx", model=str(source), drafter=drafter)
    model = tiny_model(hidden=64, dtype=torch.float32)
    save_tiny_drafter(drafter, model, save_tiny_target(source, model))
    made = find_bundle(str(source))
    made.graph.write_bytes(made.graph.read_bytes()[:-1])
    with pytest.raises(TargetError, match=r"target\.onnx is not what was written; delete"):
        load_model(settings)
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace('"model_type": "llama"', '"model_type": "gpt2"'))
    with pytest.raises(DrafterError, match="was trained on target"):
        load_model(settings)
    save_tiny_drafter(drafter, model, model_identity(source))
    with pytest.raises(TargetError, match="'gpt2' is not supported"):
        load_model(settings)
