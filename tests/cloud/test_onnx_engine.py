"""The verifier over a lowered target: the same text in any tree, batch, chunking, after eviction and resume."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cloud.engine.choice import Choice, choose_engine
from cloud.onnx_engine.loading import load_model, onnx_model
from cloud.server.service import Verifier
from cloud.settings import Settings
from outrider_core.models.host_features import HostFeatures
from outrider_core.models.moa import server_half
from outrider_core.models.moa_config import DrafterError
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Verdict
from outrider_core.targets.bundle import FORMAT_VERSION, TargetBundle
from outrider_core.targets.cached import cached_target
from outrider_core.targets.convert import make_target_bundle
from outrider_core.targets.identity import model_identity
from outrider_core.targets.source import TargetError, TargetSource
from tests.cloud.drive import in_chunks, random_tree, started
from tests.models.odd_moa import ODD, random_moa, random_sequence
from tests.targets.plain import lowered, plain_decode_8bit, skip_unless_exact
from tests.tiny import VARIANTS, save_tiny_drafter, save_tiny_target, tiny_drafter_config, tiny_model
from tests.waiting import HANG

SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.0, top_p=0.9, seed=4)]


def test_feature_rows_are_those_of_the_server_half() -> None:
    moa = random_moa(dtype=torch.float32)
    _, kv = random_sequence(ODD, 7, 1, torch.float32)
    positions = [3, 4, 5, 90, 6, 0, 1]
    want = server_half(ODD, moa.trained())(kv, torch.tensor(positions)).numpy()
    ours = HostFeatures(ODD, {name: tensor.numpy() for name, tensor in moa.trained().items()})
    np.testing.assert_allclose(ours.rows(kv.numpy(), positions), want, rtol=2e-4, atol=2e-4)


QUICK = ["llama", "qwen2", "qwen3", "gemma3_text"]
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in VARIANTS if family not in QUICK]


@pytest.fixture(scope="module", params=[*QUICK, *OTHERS])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetBundle, object]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(request.param, hidden=64, dtype=torch.float32)
    return lowered(model, folder), model


def test_many_sessions_with_evictions(bundle: tuple[TargetBundle, object]) -> None:
    made, model = bundle
    config, tensors = tiny_drafter_config(model)
    settings = Settings(max_model_len=128, max_nodes=24, kv_tokens=384, tree_budget=8, threads=1)
    arrays = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    verifier = in_chunks(Verifier(onnx_model(made, (config, arrays, "tiny"), settings), settings), 5)
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
                verdict = replies.get(timeout=HANG)
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
    made = cached_target(TargetSource.resolve(str(source)))
    made.graph.write_bytes(made.graph.read_bytes()[:-1])
    with pytest.raises(TargetError, match=r"target\.onnx is not what was written; delete"):
        load_model(settings, TargetSource.resolve(settings.model))
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace('"model_type": "llama"', '"model_type": "gpt2"'))
    with pytest.raises(DrafterError, match="was trained on target"):
        load_model(settings, TargetSource.resolve(settings.model))
    save_tiny_drafter(drafter, model, model_identity(source))
    with pytest.raises(TargetError, match="'gpt2' is not supported"):
        load_model(settings, TargetSource.resolve(settings.model))


@pytest.mark.parametrize("bits", [4, 32])
def test_a_prepared_bundle_is_served_from_its_folder(tmp_path: Path, bits: int) -> None:
    """Wherever it was made; the same drafter goes with it, and what torch alone does is refused."""
    skip_unless_exact(bits)
    model = tiny_model(hidden=64, dtype=torch.float32)
    save_tiny_drafter(tmp_path / "drafter", model, save_tiny_target(tmp_path / "target", model))
    identity = model_identity(tmp_path / "target")
    folder = tmp_path / "prepared"
    made = make_target_bundle(TargetSource("mine", tmp_path / "target"), folder, 256, bits=bits)
    shutil.rmtree(tmp_path / "target")
    values = {"model": str(folder), "drafter": tmp_path / "drafter", "max_model_len": 128, "kv_tokens": 384}
    settings = Settings(max_nodes=24, threads=1, tree_budget=8, **values)
    assert choose_engine(settings, TargetSource.resolve(settings.model)) == Choice(
        "onnx", "the target is a target bundle"
    )
    served = load_model(settings, TargetSource.resolve(settings.model))
    assert served.name == "mine" and served.target_hash == identity and served.eos_ids == made.eos_ids == (3,)
    verifier = Verifier(served, settings)
    assert made.arithmetic.startswith(f"onnx-{bits}-v{FORMAT_VERSION}-")
    assert f'arithmetic="{made.arithmetic}"'.encode() in verifier.metrics.text()
    with started(verifier) as direct:
        text, rng, session = [5, 6, 7], random.Random(0), os.urandom(16)
        truth = [*text, *plain_decode_8bit(made, text, Sampling(), 40)]
        direct.open(session, text, 0, Sampling())
        for seq in range(1, 8):
            tree = random_tree(rng, truth[len(text) :], made.config.vocab_size)
            verdict = direct.verify(session, seq, len(text), tree).get(timeout=HANG)
            assert isinstance(verdict, Verdict), verdict
            text += [tree.tokens[node] for node in verdict.accepted] + [verdict.bonus]
        assert text == truth[: len(text)] and len(text) > 10
    for wrong in ({"engine": "torch"}, {"dtype": "float32"}):
        with pytest.raises(TargetError, match=r"is a target bundle, which torch does not run; leave out --"):
            choose_engine(Settings(**values, **wrong), TargetSource.resolve(str(folder)))
    (folder / "target.onnx").write_bytes(b"half")
    with pytest.raises(TargetError, match=r"target\.onnx is not what was written; copy it again, or export it again"):
        load_model(settings, TargetSource.resolve(settings.model))
    (folder / "manifest.json").unlink()
    with pytest.raises(TargetError, match=r"there is no manifest\.json, so this is not a target bundle"):
        load_model(settings, TargetSource.resolve(settings.model))


def test_matrix_products_get_their_threads_back(tmp_path: Path) -> None:
    """Also where two engines of one process compute rows at a time."""
    from threadpoolctl import threadpool_info

    from outrider_core.models.host_features import _OneThread

    def threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    before, (one, other) = threads(), (_OneThread(), _OneThread())
    one.__enter__()
    assert threads() <= {1}
    other.__enter__()
    one.__exit__()
    assert threads() <= {1}
    other.__exit__()
    assert threads() == before


def test_matrix_products_take_one_thread_in_whichever_thread_they_are_asked_for() -> None:
    """Where they took more, those spun on a core that the engine's next step wants."""
    from concurrent.futures import ThreadPoolExecutor

    from threadpoolctl import threadpool_info

    from outrider_core.models.host_features import _OneThread

    def within() -> set[int]:
        with _OneThread():
            return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        found = [within(), *(pool.submit(within).result() for pool in (first, second, first))]
    assert all(threads <= {1} for threads in found)
