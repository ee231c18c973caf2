"""The shapes of a causal language model, read from `config.json` or from a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _OneLine(ValueError):
    """Its message is one line, whatever names in files hold."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnsupportedTarget(_OneLine):
    """The model's files describe something that is not computed here. One line that says what."""


class BrokenTarget(_OneLine):
    """A model's files do not hold what they should. One line that says which file, what is wrong and what to do."""


@dataclass(frozen=True)
class Family:
    """What a model family's decoder has that Llama's has not, beside what its config.json says of each model.

    differs: in words, for the documentation. defaults: of keys that config.json may leave out, where they are not
    Llama's. biases: "config", as attention_bias and mlp_bias say; "inputs", of query, key and value; or "none".
    windows: "none"; "all" layers have one; "layers", as layer_types says. gguf: its name in GGUF files.
    """

    differs: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: str = "config"
    windows: str = "none"
    head_norms: bool = False
    activation: str = "silu"
    gguf: str = ""


#: model families that are computed here, by their model_type
FAMILIES = {
    "llama": Family("", gguf="llama"),
    "qwen2": Family(
        "biases of query, key and value",
        {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False},
        biases="inputs",
        windows="layers",
        gguf="qwen2",
    ),
    "qwen3": Family(
        "norms of query and key heads",
        {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "use_sliding_window": False},
        windows="layers",
        head_norms=True,
        gguf="qwen3",
    ),
    "mistral": Family(
        "sliding windows", {"num_key_value_heads": 8, "sliding_window": 4096}, biases="none", windows="all"
    ),
}
#: why others are not -> their names in config.json and in GGUF files
_REFUSED = {
    "its layers are mixtures of experts": "qwen2_moe qwen2moe qwen3_moe qwen3moe mixtral gpt_oss gpt-oss granitemoe "
    "olmoe phimoe deepseek_v2 deepseek_v3 deepseek2 glm4_moe glm4moe llama4 llama4_text",
    "some of its layers are recurrent or convolutions": "lfm2 lfm2_moe lfm2moe qwen3_next qwen3next qwen3_5 "
    "qwen3_5_text qwen35 qwen3_5_moe qwen35moe falcon_h1 falcon-h1 mamba mamba2 jamba bamba nemotron_h granitehybrid",
    "it is laid out for images too": "gemma3 gemma3n mistral3 qwen2_vl qwen2vl qwen2_5_vl qwen3_vl qwen3vl gemma4",
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions. kind: "default", "linear", "llama3", "yarn" or "divided"; options: the kind's own numbers."""

    theta: float
    kind: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)

    def tables(self, positions: int, dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(cosines, sines) of positions 0.., each float32 [positions, dim / 2]."""
        inverse, gain = self.inverse_frequencies(dim)
        angles = np.arange(positions, dtype=np.float64)[:, None] * inverse
        return (np.cos(angles) * gain).astype(np.float32), (np.sin(angles) * gain).astype(np.float32)

    def inverse_frequencies(self, dim: int) -> tuple[NDArray[np.float64], float]:
        """(radians from one position to the next, of dim / 2 pairs; what cosines and sines are multiplied by)."""
        base = 1.0 / self.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "default":
            return base, 1.0
        if self.kind == "linear":
            return base / float(self.options["factor"]), 1.0
        if self.kind == "divided":
            return base / np.array(self.options["factors"], np.float64), 1.0
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
    "divided": ("factors",),
}


@dataclass(frozen=True)
class TargetConfig:
    """Shapes and constants of one model; the names are those of `config.json`, or see `Family`.

    windowed_layers see no more than `sliding_window` tokens, their own among them.
    """

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
    sliding_window: int = 0
    windowed_layers: tuple[int, ...] = ()

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
    def from_json(cls, values: Any) -> TargetConfig:
        """Of a `config.json`'s content. Raises UnsupportedTarget, and BrokenTarget if it makes no sense."""
        if not isinstance(values, dict):
            raise BrokenTarget("config.json is not a JSON object; download it again")
        name = values.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            why = next((why for why, names in _REFUSED.items() if name in names.split()), "")
            known = f"{why}; vLLM serves it" if why else f"supported: {', '.join(FAMILIES)}"
            raise UnsupportedTarget(f"model type {name!r} is not supported ({known})")
        family = FAMILIES[name]
        values = {**family.defaults, **values}
        activation = values.get("hidden_activation") or values.get("hidden_act") or family.activation
        if activation != family.activation:
            raise UnsupportedTarget(f"activation {activation!r} is not supported; {family.activation} is")
        heads, width = _count(values, "num_attention_heads"), _count(values, "hidden_size")
        context = _count(values, "max_position_embeddings")
        bias = family.biases == "config" and bool(values.get("attention_bias", False))
        window, windowed = _windows(values, family, context)
        head_dim = _count(values, "head_dim", width // heads)
        config = cls(
            family=name,
            vocab_size=_count(values, "vocab_size"),
            hidden_size=width,
            intermediate_size=_count(values, "intermediate_size"),
            num_hidden_layers=_count(values, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_count(values, "num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=_number(values, "rms_norm_eps"),
            rope=_rope(values, context, head_dim),
            max_position_embeddings=context,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            attention_bias=family.biases == "inputs" or bias,
            output_bias=bias,
            mlp_bias=family.biases == "config" and bool(values.get("mlp_bias", False)),
            head_norms=family.head_norms,
            sliding_window=window,
            windowed_layers=windowed,
        )
        if heads % config.num_key_value_heads or config.head_dim % 2:
            raise BrokenTarget(
                f"config.json: {heads} heads, {config.num_key_value_heads} key and value heads of {config.head_dim} "
                "channels do not go together"
            )
        return config

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that the model has, by name; see `outrider_core.targets.weights`."""
        width, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (self.vocab_size, width), "norm": (width,)}
        if not self.tie_word_embeddings:
            shapes["lm_head"] = (self.vocab_size, width)
        linears = {
            "self_attn.q_proj": (query, width, self.attention_bias),
            "self_attn.k_proj": (key, width, self.attention_bias),
            "self_attn.v_proj": (key, width, self.attention_bias),
            "self_attn.o_proj": (width, query, self.output_bias),
            "mlp.gate_proj": (inner, width, self.mlp_bias),
            "mlp.up_proj": (inner, width, self.mlp_bias),
            "mlp.down_proj": (width, inner, self.mlp_bias),
        }
        for layer in range(self.num_hidden_layers):
            for name, (outputs, inputs, biased) in linears.items():
                shapes[f"layers.{layer}.{name}"] = (outputs, inputs)
                if biased:
                    shapes[f"layers.{layer}.{name}.bias"] = (outputs,)
            shapes |= {f"layers.{layer}.{name}": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
            if self.head_norms:
                shapes |= {f"layers.{layer}.self_attn.{name}_norm": (self.head_dim,) for name in "qk"}
        return shapes


def _count(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive whole number; `default` if there is none, or null."""
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1 << 24 or value != int(value):
        raise BrokenTarget(f"config.json: {name} is {value!r}, not a positive whole number")
    return int(value)


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise BrokenTarget(f"config.json: {name} is {value!r}, not a number")
    return float(value)


def _windows(values: Mapping[str, Any], family: Family, context: int) -> tuple[int, tuple[int, ...]]:
    """(sliding_window, windowed_layers); (0, ()) where no window is shorter than the context."""
    count = _count(values, "num_hidden_layers")
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds) or len(kinds) not in (0, count):
        raise BrokenTarget(f"config.json: layer_types is not a list of {count} kinds")
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    known = {"full_attention", "sliding_attention"} if family.windows == "layers" else {"full_attention"}
    if not set(kinds) <= known or (window and family.windows == "none"):
        raise UnsupportedTarget("sliding-window or linear attention layers are not supported")
    if family.windows == "all":
        windowed = tuple(range(count))
    elif kinds:
        windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        windowed = tuple(range(_first_windowed(values), count))
    if not window:
        return 0, ()
    window = _count(values, "sliding_window")
    if window < context and windowed:
        raise UnsupportedTarget("sliding-window or linear attention layers are not supported")
    return 0, ()


def _first_windowed(values: Mapping[str, Any]) -> int:
    """Qwen's rule: the layers from here on have a window, if any has."""
    value = values.get("max_window_layers", 28)
    if not isinstance(value, int):
        raise BrokenTarget(f"config.json: max_window_layers is {value!r}, not a whole number")
    return max(0, value)


def _rope(values: Mapping[str, Any], context: int, dim: int) -> Rope:
    """Old and new spellings: `rope_theta` beside `rope_scaling`, or both in `rope_parameters`."""
    options = dict[str, Any]()
    for name in ("rope_scaling", "rope_parameters"):
        given = values.get(name) or {}
        if not isinstance(given, dict):
            raise BrokenTarget(f"config.json: {name} is {given!r}, not an object")
        options |= given
    if nested := [name for name, value in options.items() if isinstance(value, dict)]:
        raise UnsupportedTarget(f"rotary positions of their own for layers of {', '.join(nested)} are not supported")
    theta = options.pop("rope_theta", None) or values.get("rope_theta") or 10_000.0
    kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
    options.pop("type", None)
    if kind not in _ROPE_OPTIONS:
        known = "default, linear, dynamic, yarn or llama3"
        raise UnsupportedTarget(f"rotary positions of type {kind!r} are not supported (supported: {known})")
    if kind == "yarn":
        options.setdefault("original_max_position_embeddings", context)
    if missing := [name for name in _ROPE_OPTIONS[kind] if options.get(name) is None]:
        raise UnsupportedTarget(f"rotary positions of type {kind!r} need {', '.join(missing)} in config.json")
    rope = Rope(theta, "default" if kind == "dynamic" else kind, options)
    part = values.get("partial_rotary_factor") or options.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise UnsupportedTarget("rotary positions over a part of each head are not supported")
    try:
        with np.errstate(all="ignore"):
            inverse, gain = rope.inverse_frequencies(dim)
        if inverse.shape != (dim // 2,) or not np.isfinite([*inverse, gain]).all():
            raise ValueError
    except (ValueError, TypeError, ArithmeticError):
        raise BrokenTarget(f"config.json: no rotary positions follow from theta {theta!r} and {options}") from None
    return rope
