"""Weights rounded by torchao: trees are verified as the rounded target decodes plainly, and the rounding has a name."""

from __future__ import annotations

import builtins
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cloud.settings import Quantization, Settings
from cloud.torch_engine.loading import load_model
from cloud.torch_engine.quantization import quantize
from cloud.torch_engine.runner import Steps
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Verdict
from outrider_core.targets.source import TargetError, TargetSource
from tests.cloud.drive import expected_path, make_verifier, random_tree, started
from tests.cloud.running import save_folder
from tests.cloud.test_step_plan import make_runner, needs_compiler, of_64_rows
from tests.tiny import plain_decode, tiny_model
from tests.waiting import HANG

pytestmark = pytest.mark.gpu
FORMATS: tuple[Quantization, ...] = ("int8", "fp8")


@pytest.mark.parametrize("steps", ["loop", "pool"])
@pytest.mark.parametrize("quantization", FORMATS)
def test_trees_decode_as_the_rounded_target_does_alone(quantization: Quantization, steps: Steps) -> None:
    prompt, rng, changed = [5, 6, 7, 8], random.Random(1), False
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        model = tiny_model(layers=2, seed=4, dtype=torch.float32)  # torchao rounds no float64
        whole = plain_decode(model, prompt, sampling, 40, eos_ids=())
        quantize(model, quantization)
        truth = plain_decode(model, prompt, sampling, 40, eos_ids=())
        changed |= truth != whole
        with started(make_verifier(model, (), steps=steps)) as direct:
            session, tokens, seq = os.urandom(16), list(prompt), 0
            direct.open(session, tokens, 0, sampling)
            while len(rest := truth[len(tokens) - len(prompt) :]) > 10:
                seq, tree = seq + 1, random_tree(rng, rest, 199)
                verdict = direct.verify(session, seq, len(tokens), tree).get(timeout=HANG)
                assert isinstance(verdict, Verdict) and list(verdict.accepted) == expected_path(tree, rest)
                tokens += [tree.tokens[node] for node in verdict.accepted] + [verdict.bonus]
            assert tokens[len(prompt) :] == truth[: len(tokens) - len(prompt)]
    assert changed  # the target is really another one


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("quantization", FORMATS)
def test_a_compiled_step_of_rounded_weights_is_one_graph(quantization: Quantization) -> None:
    compiled, loop = make_runner("compiled"), make_runner("loop")
    for runner in (compiled, loop):
        quantize(runner.model, quantization)
    compiled.warm_up([64])
    with torch.compiler.set_stance("fail_on_recompile"):
        for parts in of_64_rows(12):
            got, want = (runner.forward(parts).values for runner in (compiled, loop))
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    assert compiled.steps == "compiled"


@pytest.mark.parametrize("quantization", FORMATS)
def test_the_output_layer_and_embeddings_keep_their_numbers(quantization: Quantization) -> None:
    model = tiny_model(tied=True, dtype=torch.float32)
    before = model.lm_head.weight.clone()
    quantize(model, quantization)
    assert torch.equal(model.lm_head.weight, before) and model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is not torch.Tensor


def test_answers_name_the_rounding(tmp_path: Path) -> None:
    folder = save_folder(tmp_path)
    settings = Settings(drafter=str(folder / "drafter"), quantization="int8", device="cpu")
    served = load_model(settings, TargetSource.resolve(str(folder / "target")))
    assert served.arithmetic == "torch-float32-int8"


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def import_(name: str, *rest: Any) -> Any:
        if name.startswith("torchao"):
            raise ImportError(name)
        return really(name, *rest)

    monkeypatch.setattr(builtins, "__import__", import_)
    with pytest.raises(TargetError, match=r"takes torchao; run: pip install 'outrider\[torch\]'"):
        quantize(tiny_model(), "int8")


def test_ranks_and_rounding_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="--quantization int8 works on one device, not with --tensor-parallel-size"):
        Settings(quantization="int8", tensor_parallel_size=2)
