"""Read weights of folders that others quantised, as float32. Numpy only.

Each function takes the tensors that the folder stores for one linear layer, by the ends of their names, and the
folder's quantisation options; it returns the layer's weight [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.config import BrokenTarget, UnsupportedTarget

Floats = NDArray[np.float32]
Parts = Mapping[str, NDArray[Any]]
Options = Mapping[str, Any]

#: AWQ's order of the eight weights in 32 bits
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Quantisation:
    """The method that quantised a folder. needed: tensors of each layer; optional: of some layers."""

    name: str
    options: Options
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    decode: Callable[[Parts, Options], Floats]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Quantisation | None:
        """Read the content of a config.json; None if not quantised. Raises UnsupportedTarget for other methods."""
        name = quantised_by(values)
        if not name:
            return None
        options = values.get("quantization_config") or values["quantization"]
        if name == "compressed-tensors" and options.get("format") == "float-quantized":
            name = "fp8"
        size, (key, forms) = options.get("bits", options.get("w_bit", 4)), _FORMS.get(name, ("", ()))
        form = str(options.get(key, "")).lower()
        if name not in _METHODS or size not in _BITS.get(name, (4,)) or form not in ("", *forms):
            bits = f" at {size} bits" if {"bits", "w_bit"} & options.keys() else ""
            bits += f" in the form {form!r}" if form else ""
            raise UnsupportedTarget(
                f"this folder is quantised by {name}{bits}, which is not supported here (AWQ and GPTQ of 4 bits, MLX "
                "of 4 and 8, and FP8 are); take the original model, or a GGUF file of it"
            )
        return cls(name, options, *_METHODS[name])


def quantised_by(values: Mapping[str, Any]) -> str:
    """Return the method named in a config.json; "" if it is not quantised. Raises BrokenTarget."""
    options = values.get("quantization_config") or values.get("quantization")
    if not options:
        return ""
    if not isinstance(options, dict):
        raise BrokenTarget("config.json: quantization_config is not an object")
    return str(options.get("quant_method") or ("mlx" if "group_size" in options else "a method without a name"))


def _unpacked(packed: NDArray[Any], bits: int, axis: int) -> NDArray[np.uint8]:
    """Split 32-bit numbers into 32 / bits small ones each, the lowest bits first, along `axis`."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = np.expand_dims(packed.view(np.uint32), axis + 1)
    small = (words >> shifts.reshape(-1, *[1] * (packed.ndim - axis - 1))) & np.uint32((1 << bits) - 1)
    shape = list(packed.shape)
    shape[axis] *= 32 // bits
    return small.astype(np.uint8).reshape(shape)


def _awq(parts: Parts, options: Options) -> Floats:
    def ordered(packed: NDArray[Any]) -> NDArray[np.float32]:
        small = _unpacked(packed, 4, 1)
        return small.reshape(len(small), -1, 8)[:, :, _AWQ_ORDER].reshape(small.shape).astype(np.float32)

    weight, zeros = ordered(parts["qweight"]), ordered(parts["qzeros"])
    group = _group(weight, zeros, options)
    scaled: Floats = (weight - zeros.repeat(group, 0)) * parts["scales"].astype(np.float32).repeat(group, 0)
    return scaled.T


def _gptq(parts: Parts, options: Options) -> Floats:
    weight = _unpacked(parts["qweight"], 4, 0).astype(np.float32)
    zeros = _unpacked(parts["qzeros"], 4, 1).astype(np.float32)
    if options.get("checkpoint_format", "gptq") == "gptq":  # the first version stores one less
        zeros += 1
    size = _group(weight, zeros, options)
    group = parts["g_idx"] if "g_idx" in parts else np.arange(len(weight)) // size
    scaled: Floats = (weight - zeros[group]) * parts["scales"].astype(np.float32)[group]
    return scaled.T


def _group(weight: Floats, zeros: Floats, options: Options) -> int:
    """Return how many inputs share a scale, on which tensors and options must agree. Raises ValueError."""
    stated = options.get("group_size", options.get("q_group_size")) or -1
    group, rest = divmod(len(weight), len(zeros))
    if rest or stated not in (-1, group):
        raise ValueError(f"{len(weight)} inputs in {len(zeros)} groups of {stated}")
    return group


def _mlx(parts: Parts, options: Options) -> Floats:
    weight = _unpacked(parts["weight"], options["bits"], 1).astype(np.float32)
    group = int(options["group_size"])
    scales, biases = (parts[name].astype(np.float32).repeat(group, 1) for name in ("scales", "biases"))
    scaled: Floats = weight * scales + biases
    return scaled


def _fp8(parts: Parts, options: Options) -> Floats:
    weight = parts["weight"].astype(np.float32)
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    outputs = len(weight) if scale.size == len(weight) else 1  # or one scale for all
    groups = [group["weights"].get("block_structure") for group in options.get("config_groups", {}).values()]
    whole = len(weight) // outputs, weight.shape[1]
    block = [int(size) for size in options.get("weight_block_size") or next(filter(None, groups), whole)]
    blocks = [-(-whole // size) for whole, size in zip(weight.shape, block, strict=True)]
    scale = scale.astype(np.float32).reshape(blocks)
    spread = scale.repeat(block[0], 0).repeat(block[1], 1)
    scaled: Floats = weight * spread[: weight.shape[0], : weight.shape[1]]
    return scaled


def float8_values() -> Floats:
    """Return the values of the 256 bytes in FP8 E4M3."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    small = exponent == 0
    size = np.where(small, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size = np.where((byte & 127) == 127, np.nan, size)
    return np.where(byte & 128, -size, size).astype(np.float32)


_METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Parts, Options], Floats]]] = {
    "awq": (("qweight", "qzeros", "scales"), (), _awq),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",), _gptq),
    "mlx": (("weight", "scales", "biases"), (), _mlx),
    "fp8": (("weight",), ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale"), _fp8),
}
_BITS = {"mlx": (4, 8), "fp8": (4, 8)}
#: the option that names the layout of numbers, and its supported values
_FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "awq": ("version", ("gemm",)),
    "gptq": ("checkpoint_format", ("gptq", "gptq_v2")),
    "mlx": ("mode", ("affine",)),
}
