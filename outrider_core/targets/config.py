"""The shapes of a causal language model, read from `config.json` or from a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: model families with one decoder layout: RMS norm, rotary positions, grouped-query attention, gated MLP
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


class UnsupportedTarget(ValueError):
    """The model's files describe something that is not computed here. One line that says what."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions. kind: "default", "linear", "llama3" or "yarn"; options: the kind's own numbers."""

    theta: float
    kind: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)

    def tables(self, positions: int, dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(cosines, sines) of positions 0.., each float32 [positions, dim / 2]."""
        inverse, gain = self._inverse_frequencies(dim)
        angles = np.arange(positions, dtype=np.float64)[:, None] * inverse
        return (np.cos(angles) * gain).astype(np.float32), (np.sin(angles) * gain).astype(np.float32)

    def _inverse_frequencies(self, dim: int) -> tuple[NDArray[np.float64], float]:
        base = 1.0 / self.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "default":
            return base, 1.0
        if self.kind == "linear":
            return base / float(self.options["factor"]), 1.0
        if self.kind == "llama3":
            return self._llama3(base), 1.0
        return self._yarn(base, dim)

    def _llama3(self, base: NDArray[np.float64]) -> NDArray[np.float64]:
        factor, low, high = (float(self.options[n]) for n in ("factor", "low_freq_factor", "high_freq_factor"))
        context = float(self.options["original_max_position_embeddings"])
        turns = context * base / (2 * math.pi)  # of the circle, over the context it was trained with
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        scaled: NDArray[np.float64] = (1 - share) * base / factor + share * base
        return scaled

    def _yarn(self, base: NDArray[np.float64], dim: int) -> tuple[NDArray[np.float64], float]:
        """YaRN, arXiv 2309.00071, as `transformers` computes it."""
        options = self.options
        factor, context = float(options["factor"]), float(options["original_max_position_embeddings"])
        fast, slow = float(options.get("beta_fast") or 32), float(options.get("beta_slow") or 1)

        def bound(turns: float) -> float:
            return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = bound(fast), bound(slow)
        if options.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        ramp = np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
        inverse = base / factor * ramp + base * (1 - ramp)
        return inverse, self._yarn_gain(factor)

    def _yarn_gain(self, factor: float) -> float:
        def scale(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        given, top, bottom = (self.options.get(n) for n in ("attention_factor", "mscale", "mscale_all_dim"))
        if given is not None:
            return float(given)
        return scale(float(top)) / scale(float(bottom)) if top and bottom else scale(1.0)


#: rotary kinds that depend on positions alone; "dynamic" does too, within the context that a model was trained with
_ROPE_OPTIONS = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class TargetConfig:
    """Shapes and constants of one model; the names are those of `config.json`."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # of query, key and value
    output_bias: bool  # of the attention's output
    mlp_bias: bool
    head_norms: bool  # each query and key head is normalised (Qwen3)

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def linear_weights(self) -> int:
        """Weights of all linear layers: what a step reads, however many tokens it computes."""
        attention = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.hidden_size * self.vocab_size

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TargetConfig:
        """Of a `config.json`'s content. Raises UnsupportedTarget."""
        family = values.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedTarget(f"model type {family!r} is not supported (supported: {', '.join(FAMILIES)})")
        if values.get("hidden_act", "silu") != "silu":
            raise UnsupportedTarget(f"activation {values['hidden_act']!r} is not supported; silu is")
        _check_attention(values)
        heads, width = int(values["num_attention_heads"]), int(values["hidden_size"])
        context = int(values["max_position_embeddings"])
        bias = bool(values.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=int(values["vocab_size"]),
            hidden_size=width,
            intermediate_size=int(values["intermediate_size"]),
            num_hidden_layers=int(values["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or width // heads),
            rms_norm_eps=float(values["rms_norm_eps"]),
            rope=_rope(values),
            max_position_embeddings=context,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2" or bias,
            output_bias=bias and family != "qwen2",
            mlp_bias=bool(values.get("mlp_bias", False)),
            head_norms=family == "qwen3",
        )


def _check_attention(values: Mapping[str, Any]) -> None:
    layers = set(values.get("layer_types") or ["full_attention"])
    window = values.get("sliding_window") and values.get("use_sliding_window", True)
    if layers != {"full_attention"} or window:
        raise UnsupportedTarget("sliding-window or linear attention layers are not supported")


def _rope(values: Mapping[str, Any]) -> Rope:
    """Old and new spellings: `rope_theta` beside `rope_scaling`, or both in `rope_parameters`."""
    options = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    theta = float(options.pop("rope_theta", None) or values.get("rope_theta") or 10_000.0)
    kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
    options.pop("type", None)
    if kind not in _ROPE_OPTIONS:
        known = ", ".join(_ROPE_OPTIONS)
        raise UnsupportedTarget(f"rotary positions of type {kind!r} are not supported (supported: {known})")
    if kind == "yarn":
        options.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    if missing := [name for name in _ROPE_OPTIONS[kind] if options.get(name) is None]:
        raise UnsupportedTarget(f"rotary positions of type {kind!r} need {', '.join(missing)} in config.json")
    if float(values.get("partial_rotary_factor") or options.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedTarget("rotary positions over a part of each head are not supported")
    return Rope(theta, "default" if kind == "dynamic" else kind, {name: options[name] for name in options})
