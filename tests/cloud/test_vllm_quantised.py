"""Quantised models on vLLM: served with the text of plain decoding, or refused in one line."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cloud.server.service import Verifier
from cloud.settings import Settings
from outrider_core.models.target import TargetFiles
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Generate, Verdict
from outrider_core.targets.source import TargetError
from tests.cloud.drive import FOR_VLLM, random_tree, started
from tests.cloud.running import PROMPT
from tests.tiny import plain_decode, tiny_drafter_config, tiny_model
from tests.waiting import HANG

pytestmark = pytest.mark.vllm

VOCAB, GROUP = 199, 32
Stored = dict[str, torch.Tensor]


def awq(weight: torch.Tensor) -> Stored:
    """4 bits, as AWQ stores them."""
    place = (0, 4, 1, 5, 2, 6, 3, 7)  # of each of eight columns among the nibbles of a number
    columns = weight.T.reshape(-1, GROUP, weight.shape[0])  # [groups, inputs of a group, outputs]
    low, high = columns.amin(1, keepdim=True), columns.amax(1, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (columns / scale + zero).round().clamp(0, 15).reshape(weight.shape[1], -1)
    stored = {"scales": scale[:, 0].bfloat16()}
    for key, values in (("qweight", codes), ("qzeros", zero[:, 0])):
        numbers = values.to(torch.int64).reshape(len(values), -1, 8)
        packed = sum(numbers[..., column] << 4 * place[column] for column in range(8))
        assert isinstance(packed, torch.Tensor)
        stored[key] = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    return stored


def fp8_per_row(weight: torch.Tensor) -> Stored:
    """FP8 with a scale for each output, as compressed-tensors stores it; activations have one for each token."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8(weight: torch.Tensor) -> Stored:
    """FP8 with one scale, for activations too."""
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale.reshape(1),
        "input_scale": torch.tensor([0.05]),
    }


def fp8_blocks(weight: torch.Tensor) -> Stored:
    scale = torch.full((-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)), float(weight.abs().max() / 448))
    return {"weight": (weight / scale[0, 0]).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
PER_ROW: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {**EIGHT, "strategy": "channel", "dynamic": False},
            "input_activations": {**EIGHT, "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip
Method = tuple[Callable[[torch.Tensor], Stored], dict[str, Any]]
SERVED: dict[str, Method] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "compressed-tensors": (fp8_per_row, PER_ROW),
}
CACHE = {**EIGHT, "strategy": "tensor", "dynamic": False}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
REFUSED: dict[str, tuple[Method, str]] = {
    "no kernel": ((fp8, {"quant_method": "fp8", "activation_scheme": "static"}), "scaled_fp8_quant"),
    "a narrow cache": ((fp8_per_row, {**PER_ROW, "kv_cache_scheme": CACHE}), "remove its kv_cache_scheme"),
    "no AMX": ((fp8_blocks, BLOCKS), "AMX"),
}


def made_verifier(folder: Path, method: Method) -> Verifier:
    """A verifier of a tiny model whose linear layers are stored by this method."""
    from cloud.vllm_engine.loading import vllm_model

    model = tiny_model("qwen2", vocab=VOCAB, **FOR_VLLM)
    model.save_pretrained(folder)
    store, keys = method
    stored = Stored()
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            parts = store(tensor)
            stored |= {name.removesuffix("weight") + key: part.contiguous() for key, part in parts.items()}
        else:
            stored[name] = tensor.bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": keys, "dtype": "bfloat16"}))
    settings = Settings(max_model_len=128, max_nodes=24, kv_tokens=512)
    files = TargetFiles(model.config, None, "tiny", folder, "tiny-target", ())
    return Verifier(vllm_model(files, (*tiny_drafter_config(model), "tiny"), settings), settings)


@pytest.mark.parametrize("method", SERVED)
def test_served_ones_write_the_text_of_plain_decoding(tmp_path: Path, method: str) -> None:
    """In bfloat16: the same through trees, beside another session, as token by token; and not what float32 writes."""
    verifier = made_verifier(tmp_path, SERVED[method])
    assert verifier.arithmetic == f"vllm-0.32-bfloat16-{method}"
    rng = random.Random(4)
    with started(verifier) as direct:
        plain, trees, other = (os.urandom(16) for _ in range(3))
        direct.open(plain, PROMPT)
        replies = direct.submit(plain, Generate(0, 1, 3, 60))[1]
        truth = [replies.get(timeout=HANG).bonus for _ in range(60)]  # type: ignore[union-attr]
        direct.open(trees, PROMPT)
        direct.open(other, PROMPT[::-1])
        beside = direct.submit(other, Generate(0, 1, 3, 100))[1]
        text, seq, accepted = list(PROMPT), 0, 0
        while len(text) < 50:
            seq += 1
            tree = random_tree(rng, truth[len(text) - 3 :], VOCAB)
            verdict = direct.verify(trees, seq, len(text), tree).get(timeout=HANG)
            assert isinstance(verdict, Verdict)
            text += [*(tree.tokens[node] for node in verdict.accepted), verdict.bonus]
            accepted += len(verdict.accepted)
        assert text[3:] == truth[: len(text) - 3] and accepted > 8
        assert isinstance(beside.get(timeout=HANG), Verdict)
    model = tiny_model("qwen2", vocab=VOCAB, **FOR_VLLM)
    assert truth != plain_decode(model, PROMPT, Sampling(), 60, eos_ids=()), "it was not quantised"


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    method, says = REFUSED[fault]
    if fault != "a narrow cache" and (torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM has kernels for it here")
    with pytest.raises(TargetError, match=rf"vLLM does not run .*{says}") as refused:
        made_verifier(tmp_path, method)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("static", "shape", "refused"), [(False, (-1, -1), True), (True, (-1, -1), False), (False, (1, -1), False)]
)
def test_a_scale_that_a_whole_step_shares_is_refused(static: bool, shape: tuple[int, int], refused: bool) -> None:
    """There is no such kernel on a CPU, so a layer says that it has one."""
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import PerTensorTorchFP8ScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    from cloud.vllm_engine.steps import check_rounding

    kernel = object.__new__(PerTensorTorchFP8ScaledMMLinearKernel)
    kernel.quant_fp8 = SimpleNamespace(static=static, group_shape=GroupShape(*shape))
    layer = torch.nn.Linear(1, 1)
    layer.quant_method = SimpleNamespace(fp8_linear=kernel)  # type: ignore[assignment]
    with pytest.raises(TargetError, match="depend on each other") if refused else nullcontext():
        check_rounding(torch.nn.Sequential(layer))
