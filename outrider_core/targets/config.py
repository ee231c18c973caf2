"""The shapes of a causal language model, read from `config.json` or from a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.families import FAMILIES, REFUSED, Family
from outrider_core.targets.rope import Rope


class _OneLine(ValueError):
    """An error whose message is one line, whatever the names in files contain."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UnsupportedTarget(_OneLine):
    """The model's files describe something that is not supported. One line that says what."""


class BrokenTarget(_OneLine):
    """A model's files do not hold what they should. One line that says which file, what is wrong and what to do."""


#: rotary kinds that depend on positions alone; so does "dynamic", within the context that a model was trained with
_ROPE_OPTIONS = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class TargetConfig:
    """Shapes and constants of one model; the names are those of `config.json`, or see `Family`.

    windowed_layers attend to at most `sliding_window` tokens, their own included, and use window_rope if it is given.
    unrotated_layers have no rotary positions. rotary_dim: channels of a head that are rotated, 0: all. attention_scale:
    factor of scores, 0: by the heads' width. query_growth: factor that grows with the logarithm of a query's position
    (Ministral 3). max_position_embeddings: at most the length for which the rotary tables are right.
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
    window_rope: Rope | None = None
    unrotated_layers: tuple[int, ...] = ()
    rotary_dim: int = 0
    activation: str = "silu"
    joined_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float = 0.0
    query_growth: float = 0.0

    @property
    def group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def linear_weights(self) -> int:
        """Number of weights in all linear layers: what a step reads, however many tokens it computes."""
        attention = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.hidden_size * self.vocab_size

    @property
    def rotary_width(self) -> int:
        """Channels of a head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def score_scale(self) -> float:
        """The factor by which products of queries and keys are multiplied."""
        return self.attention_scale or self.head_dim**-0.5

    def query_factors(self, positions: int) -> NDArray[np.float32]:
        """Return the factors of queries at positions 0 to `positions` - 1."""
        if not self.query_growth:
            return np.ones(positions, np.float32)
        trained = self.rope.options["original_max_position_embeddings"]
        factors: NDArray[np.float64] = 1 + self.query_growth * np.log1p(np.arange(positions) // trained)
        return factors.astype(np.float32)

    def norms(self, layer: int) -> tuple[str, str, str, str]:
        """Return a layer's norms: before and after attention, before and after the MLP; "" for a missing one."""
        before = "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"
        names = (
            "input_layernorm" if self.pre_norms else "",
            "post_attention_layernorm" if self.post_norms else "",
            before if self.pre_norms else "",
            "post_feedforward_layernorm" if self.post_norms else "",
        )
        first, second, third, fourth = (f"layers.{layer}.{name}" if name else "" for name in names)
        return first, second, third, fourth

    @classmethod
    def from_manifest(cls, values: Mapping[str, Any]) -> TargetConfig:
        """Read what `dataclasses.asdict` wrote to a manifest. Raises TypeError."""
        ropes = {name: Rope(**values[name]) for name in ("rope", "window_rope") if values.get(name)}
        layers = {name: tuple(values.get(name, ())) for name in ("windowed_layers", "unrotated_layers")}
        return cls(**{**values, **layers, **ropes})

    @classmethod
    def from_json(cls, values: Any) -> TargetConfig:
        """Read the content of a `config.json`. Raises UnsupportedTarget, and BrokenTarget if it makes no sense."""
        if not isinstance(values, dict):
            raise BrokenTarget("config.json is not a JSON object; download it again")
        name = values.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            why = next((why for why, names in REFUSED.items() if name in names.split()), "")
            known = f"{why}; vLLM serves it" if why else f"supported: {', '.join(FAMILIES)}"
            raise UnsupportedTarget(f"model type {name!r} is not supported ({known})")
        family = FAMILIES[name]
        values = {**family.defaults, **values}
        if name == "granitemoehybrid":
            values = _dense_granite(values)
        activation = values.get("hidden_activation") or values.get("hidden_act") or family.activation
        if activation != family.activation:
            raise UnsupportedTarget(f"activation {activation!r} is not supported; {family.activation} is")
        heads, width = _count(values, "num_attention_heads"), _count(values, "hidden_size")
        context = _count(values, "max_position_embeddings")
        unrotated = _unrotated(values)
        window, windowed = _windows(values, family, context, unrotated)
        head_dim = _count(values, "head_dim", width // heads)
        rotary_dim = int(head_dim * _rotary_share(values, family))
        rope, window_rope = _ropes(values, family, context, rotary_dim)
        bias = family.biases in ("config", "attention") and bool(values.get("attention_bias", False))
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
            rope=rope,
            max_position_embeddings=min(context, rope.longest),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            attention_bias=family.biases == "inputs" or bias,
            output_bias=bias,
            mlp_bias=family.biases == "config" and bool(values.get("mlp_bias", False)),
            head_norms=family.head_norms,
            sliding_window=window,
            windowed_layers=windowed,
            window_rope=window_rope if windowed else None,
            unrotated_layers=unrotated,
            rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
            activation="silu" if family.activation == "silu" else "gelu",
            joined_norms=family.joined_norms,
            pre_norms=family.pre_norms,
            post_norms=family.post_norms,
            **_scales(values, family, name),
        )
        if heads % config.num_key_value_heads or config.head_dim % 2:
            raise BrokenTarget(
                f"config.json: {heads} heads, {config.num_key_value_heads} key and value heads of {config.head_dim} "
                "channels do not fit together"
            )
        return config

    def lacking(self, other: TargetConfig) -> str:
        """Describe what `other` computes differently, apart from biases that may be zeros; "" if nothing."""
        tensors = other.tensors()
        if name := next((name for name, shape in self.tensors().items() if tensors.get(name) != shape), ""):
            return f"tensor {name}"
        for name, own in vars(self).items():
            found = getattr(other, name)
            if isinstance(own, Rope) and isinstance(found, Rope):
                mine, theirs = (np.append(*rope.inverse_frequencies(self.rotary_width)) for rope in (own, found))
                same = bool(np.allclose(mine, theirs, rtol=1e-6, atol=0))
            else:
                same = bool(own == found)
            if not same and not name.endswith("_bias"):
                return f"{name} {own}"
        return ""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the model by name; see `outrider_core.targets.weights`."""
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
            shapes |= {name: (width,) for name in self.norms(layer) if name}
            if self.head_norms or self.joined_norms:
                sizes = (self.head_dim, self.head_dim) if self.head_norms else (query, key)
                shapes |= {
                    f"layers.{layer}.self_attn.{name}_norm": (size,) for name, size in zip("qk", sizes, strict=True)
                }
        return shapes


def _count(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive whole number; `default` if it is missing or null."""
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1 << 24 or value != int(value):
        raise BrokenTarget(f"config.json: {name} is {value!r}, not a positive whole number")
    return int(value)


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise BrokenTarget(f"config.json: {name} is {value!r}, not a number")
    return float(value)


def _dense_granite(values: dict[str, Any]) -> dict[str, Any]:
    """Return a granite model's values. Raises UnsupportedTarget for one with experts or recurrent layers."""
    kinds = values.get("layer_types") or ["mamba"]
    if values.get("num_local_experts", 8) or not {*map(str, kinds)} <= {"attention", "full_attention"}:
        raise UnsupportedTarget(
            "model type 'granitemoehybrid' is only supported without experts and recurrent layers; vLLM serves it"
        )
    count = _count(values, "num_hidden_layers")
    unrotated = [0] * count if values.get("position_embedding_type") != "rope" else None
    dense = {"layer_types": None, "intermediate_size": values.get("shared_intermediate_size", 1024)}
    return {**values, **dense, "no_rope_layers": unrotated}


def _scales(values: Mapping[str, Any], family: Family, name: str) -> dict[str, float]:
    """Return the factors by which parts of the model are multiplied."""
    if family.multipliers:
        return {
            "embedding_scale": _number(values, "embedding_multiplier", 1.0),
            "residual_scale": _number(values, "residual_multiplier", 1.0),
            "logit_scale": 1.0 / (_number(values, "logits_scaling", 1.0) or math.nan),
            "attention_scale": _number(values, "attention_multiplier", 1.0),
        }
    if name == "gemma3_text":
        for cap in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if values.get(cap):
                raise UnsupportedTarget(f"{cap} {values[cap]!r} is not supported")
        scalar = _count(values, "query_pre_attn_scalar")
        return {"embedding_scale": math.sqrt(_count(values, "hidden_size")), "attention_scale": scalar**-0.5}
    if name == "ministral3":
        return {"query_growth": _number(values.get("rope_parameters") or {}, "llama_4_scaling_beta", 0.0)}
    return {}


def _unrotated(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers without rotary positions."""
    count, rotated = _count(values, "num_hidden_layers"), values.get("no_rope_layers")
    if rotated is None and "no_rope_layer_interval" in values:
        interval = _count(values, "no_rope_layer_interval")
        rotated = [(layer + 1) % interval for layer in range(count)]
    if rotated is None:
        return ()
    if not isinstance(rotated, list) or len(rotated) < count:
        raise BrokenTarget(f"config.json: no_rope_layers is not a list of {count} numbers")
    return tuple(layer for layer in range(count) if not rotated[layer])


def _windows(
    values: Mapping[str, Any], family: Family, context: int, unrotated: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """Return (sliding_window, windowed_layers); (0, ()) if no window is shorter than the context."""
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
    elif "sliding_window_pattern" in values:  # Gemma's rule: every n-th layer attends to everything
        pattern = _count(values, "sliding_window_pattern")
        windowed = tuple(layer for layer in range(count) if (layer + 1) % pattern)
    elif "no_rope_layer_interval" in values:
        windowed = unrotated
    else:
        windowed = tuple(range(_first_windowed(values), count))
    if not window or not windowed:
        return 0, ()
    window = _count(values, "sliding_window")
    return (window, windowed) if window < context else (0, ())


def _first_windowed(values: Mapping[str, Any]) -> int:
    """Return the first layer that has a window, by Qwen's rule."""
    value = values.get("max_window_layers", 28)
    if not isinstance(value, int):
        raise BrokenTarget(f"config.json: max_window_layers is {value!r}, not a whole number")
    return max(0, value)


def _rotary_share(values: Mapping[str, Any], family: Family) -> float:
    """Return the share of a head's channels that is rotated."""
    options = values.get("rope_parameters") or values.get("rope_scaling") or {}
    inside = options.get("partial_rotary_factor") if isinstance(options, dict) else None
    share = _number(
        {"partial_rotary_factor": inside or values.get("partial_rotary_factor")}, "partial_rotary_factor", 1.0
    )
    if share != 1.0 and not (family.partial and 0 < share < 1):
        raise UnsupportedTarget("rotary positions over a part of each head are not supported")
    return share


def _ropes(values: Mapping[str, Any], family: Family, context: int, dim: int) -> tuple[Rope, Rope | None]:
    """Return (rotary positions, those of windowed layers if they have their own).

    Old and new spellings: `rope_theta` beside `rope_scaling`, or both in `rope_parameters`.
    """
    options = dict[str, Any]()
    for name in ("rope_scaling", "rope_parameters"):
        given = values.get(name) or {}
        if not isinstance(given, dict):
            raise BrokenTarget(f"config.json: {name} is {given!r}, not an object")
        options |= given
    nested = {name: dict(value) for name, value in options.items() if isinstance(value, dict)}
    if "rope_local_base_freq" in values:
        local = {"rope_theta": values["rope_local_base_freq"], **nested.pop("sliding_attention", {})}
        options = nested.pop("full_attention", {} if "sliding_attention" in options else options)
        return _rope(options, values, context, dim), _rope(local, values, context, dim)
    if nested:
        raise UnsupportedTarget(f"rotary positions of their own for layers of {', '.join(nested)} are not supported")
    return _rope(options, values, context, dim), None


def _rope(options: dict[str, Any], values: Mapping[str, Any], context: int, dim: int) -> Rope:
    given = options.pop("rope_theta", None), values.get("rope_theta"), 10_000.0
    theta = next(each for each in given if each is not None)
    kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
    options.pop("type", None)
    if kind not in _ROPE_OPTIONS:
        known = "default, linear, dynamic, yarn, llama3 or longrope"
        raise UnsupportedTarget(f"rotary positions of type {kind!r} are not supported (supported: {known})")
    if kind in ("yarn", "llama3", "longrope"):
        trained = values.get("original_max_position_embeddings")
        if trained is not None:
            options["original_max_position_embeddings"] = trained
        elif kind == "yarn":
            options.setdefault("original_max_position_embeddings", context)
    if missing := [name for name in _ROPE_OPTIONS[kind] if options.get(name) is None]:
        raise UnsupportedTarget(f"rotary positions of type {kind!r} need {', '.join(missing)} in config.json")
    if kind == "longrope":
        options.setdefault("factor", context / _count(options, "original_max_position_embeddings"))
    rope = Rope(theta, "default" if kind == "dynamic" else kind, options)
    try:
        with np.errstate(all="ignore"):
            inverse, gain = rope.inverse_frequencies(dim)
        whole = inverse.shape == (dim // 2,) and np.isfinite([*inverse, gain]).all() and (inverse > 0).all()
        if not whole or not rope.longest > 0:
            raise ValueError
    except (ValueError, TypeError, ArithmeticError):
        raise BrokenTarget(f"config.json: no rotary positions follow from theta {theta!r} and {options}") from None
    return rope
