"""Folders that others have quantised are read, or refused by the name of the method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from outrider_core.targets.config import TargetConfig, UnsupportedTarget
from outrider_core.targets.quantised import Quantisation, float8_values
from outrider_core.targets.weights import folder_weights
from tests.targets.gguf_files import LLAMA, random_arrays, write_folder

Array = NDArray[Any]
CONFIG = TargetConfig.from_json(LLAMA)
GROUP = 8
#: numbers of 4 bits, their scales and zero points; what they stand for
Stored = dict[str, Array]


def grid(weight: Array) -> tuple[Array, Array, Array, Array]:
    """weight [N, K] -> (numbers of 4 bits [N, K], zero points [N, groups], scales [N, groups], the weight then)."""
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = groups.min(-1), groups.max(-1)
    scales = ((high - low) / 15).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 1, 15)
    numbers = np.clip(np.rint(groups / scales[..., None] + zeros[..., None]), 0, 15)
    meant = (numbers - zeros[..., None]) * scales[..., None]
    return numbers.reshape(weight.shape).astype(int), zeros.astype(int), scales, meant.reshape(weight.shape)


def packed(numbers: Array, axis: int, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Array:
    """Eight numbers in 32 bits, along `axis`; the one at order[i] in the i-th place."""
    numbers = np.moveaxis(numbers, axis, -1)
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] * bits // 32), np.uint32)
    for place, of in enumerate(order[: 32 // bits]):
        words |= numbers[..., of :: 32 // bits].astype(np.uint32) << np.uint32(bits * place)
    return np.moveaxis(words, -1, axis).view(np.int32)


def tensor(values: Array | torch.Tensor) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def awq(weight: Array) -> tuple[Stored, Array]:
    numbers, zeros, scales, meant = grid(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": packed(numbers.T, 1, order), "qzeros": packed(zeros.T, 1, order), "scales": scales.T}
    return stored, meant


def gptq(weight: Array) -> tuple[Stored, Array]:
    """With groups of inputs in an order of their own."""
    numbers, zeros, scales, meant = grid(weight)
    order = np.random.default_rng(0).permutation(weight.shape[1])
    index = (order // GROUP).astype(np.int32)
    stored = {
        "qweight": packed(numbers[:, order].T, 0),
        "qzeros": packed(zeros.T - 1, 1),
        "scales": scales.T,
        "g_idx": index,
    }
    return stored, meant[:, order]


def mlx(weight: Array) -> tuple[Stored, Array]:
    numbers, zeros, scales, meant = grid(weight)
    return {"weight": packed(numbers, 1).view(np.uint32), "scales": scales, "biases": -zeros * scales}, meant


def fp8(weight: Array) -> tuple[Stored, Array]:
    scale = np.abs(weight).max(1, keepdims=True) / 448
    rounded = torch.from_numpy(weight / scale).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float().numpy() * scale


def fp8_blocks(weight: Array) -> tuple[Stored, Array]:
    """Blocks of 16 by 16, the last of them smaller."""
    rows, columns = -(-weight.shape[0] // 16), -(-weight.shape[1] // 16)
    scale = np.random.default_rng(0).uniform(0.01, 0.1, (rows, columns)).astype(np.float32)
    spread = scale.repeat(16, 0).repeat(16, 1)[: weight.shape[0], : weight.shape[1]]
    rounded = torch.from_numpy(weight / spread).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale_inv": scale}, rounded.float().numpy() * spread


METHODS: dict[str, tuple[Callable[[Array], tuple[Stored, Array]], dict[str, Any]]] = {
    "awq": (awq, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}}),
    "gptq": (gptq, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP}}),
    "mlx": (mlx, {"quantization": {"group_size": GROUP, "bits": 4}}),
    "fp8": (fp8, {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}),
    "fp8 blocks": (fp8_blocks, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_folder_is_read(tmp_path: Path, method: str) -> None:
    quantise, keys = METHODS[method]
    write_folder(tmp_path, {**LLAMA, **keys}, {})
    stored, meant = dict[str, torch.Tensor](), dict[str, Array]()
    for name, values in random_arrays(CONFIG).items():
        base = name if name == "lm_head" else f"model.{name}"
        if "_proj" in name:
            parts, meant[name] = quantise(values)
            stored |= {f"{base}.{part}": tensor(each) for part, each in parts.items()}
        else:
            stored[f"{base}.weight"], meant[name] = torch.from_numpy(values), values
    save_file(stored, tmp_path / "model.safetensors")
    weights, config = folder_weights(tmp_path)
    for name in config.tensors():
        np.testing.assert_allclose(weights.read(name), meant[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantised by bitsandbytes, which is not supported here",
        ),
        ({"quant_method": "gptq", "bits": 3}, "quantised by gptq at 3 bits"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "quantised by compressed-tensors"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "quantised by awq at 4 bits in the form 'gemv'"),
        ({"quant_method": "awq", "w_bit": 8}, "quantised by awq at 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the form 'marlin'"),
        ({"quant_method": "of tomorrow"}, "quantised by of tomorrow"),
    ],
)
def test_another_method_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    write_folder(tmp_path, {**LLAMA, "quantization_config": keys}, random_arrays(CONFIG))
    with pytest.raises(UnsupportedTarget, match=f"{says}.*GGUF"):
        folder_weights(tmp_path)


@pytest.mark.parametrize(
    ("scale", "keys"),
    [
        (np.ones((3, 2)), {}),  # blocks of a size that nobody states
        (np.ones((5, 3)), {"weight_block_size": [16, 16]}),
        (np.ones((1, 1)), {"weight_block_size": [16, 16]}),
    ],
)
def test_scales_that_do_not_cover_a_weight_are_refused(scale: Array, keys: dict[str, Any]) -> None:
    found = Quantisation.of({"quantization_config": {"quant_method": "fp8", **keys}})
    assert found
    with pytest.raises(ValueError, match="cannot reshape"):
        found.decode({"weight": np.ones((64, 32)), "weight_scale": scale}, found.options)


def test_scales_of_rows_may_stand_in_a_row() -> None:
    found, scale = Quantisation.of({"quantization_config": {"quant_method": "fp8"}}), np.arange(64.0)
    assert found
    parts = {"weight": np.ones((64, 64)), "weight_scale": scale}
    np.testing.assert_array_equal(found.decode(parts, found.options), scale[:, None].repeat(64, 1))


def test_groups_of_another_size_than_stated_are_refused() -> None:
    stored, _ = awq(np.random.default_rng(0).normal(size=(16, 32)))
    found = Quantisation.of({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 4}})
    assert found
    with pytest.raises(ValueError, match="32 inputs in 4 groups of 4"):
        found.decode(stored, found.options)


def test_every_byte_of_float8() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(float8_values(), theirs)
