"""Read a TargetConfig from the metadata of a GGUF file. Every key is used, or refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.families import FAMILIES, Family
from outrider_core.targets.gguf_file import GgufFile

#: tensors of divisors of rotary frequencies: for texts of any length; or within and beyond the trained context
_COMMON, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
#: keys after the family's name that are read below
_READ = (
    "vocab_size context_length embedding_length feed_forward_length block_count attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon "
    "rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.type rope.scaling.factor "
    "rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor "
    "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier attention.scale"
)
#: keys of single families, with their names in config.json
_OWN: dict[str, dict[str, str]] = {
    "granite": {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "mistral3": {"attention.temperature_scale": "llama_4_scaling_beta"},
    "gemma3": {
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    "phi3": {"attention.sliding_window": "sliding_window"},
}
#: keys that change nothing if they have these values
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, family: Family) -> str:
    """Return the name that GGUF files give to a tensor of TargetConfig.tensors."""
    bare, suffix = (name[: -len(".bias")], ".bias") if name.endswith(".bias") else (name, ".weight")
    if bare in _NAMES:
        return _NAMES[bare] + suffix
    _, layer, part = bare.split(".", 2)
    return f"blk.{layer}.{family.gguf_parts.get(part) or _PARTS[part]}{suffix}"


def rope_tensors(file: GgufFile) -> tuple[str, ...]:
    """Return the names of the tensors with rotary divisors; those of LongRoPE come in pairs."""
    if _COMMON in file.tensors:
        return (_COMMON,)
    return (_SHORT, _LONG) if {_SHORT, _LONG} <= file.tensors.keys() else ()


def gguf_config(file: GgufFile) -> TargetConfig:
    """Read the config. Raises UnsupportedTarget for unsupported features, BrokenTarget for senseless metadata."""
    config = TargetConfig.from_json(gguf_values(file))
    return replace(
        config,
        attention_bias=FAMILIES[config.family].biases == "inputs" or _biased(file, config.family, "self_attn.q_proj"),
        output_bias=_biased(file, config.family, "self_attn.o_proj"),
        mlp_bias=_biased(file, config.family, "mlp.gate_proj", "mlp.down_proj"),
        attention_scale=float(_Keys(file).get("attention.scale", 0) or config.attention_scale),
    )


def _biased(file: GgufFile, family: str, *parts: str) -> bool:
    return any(gguf_name(f"layers.0.{part}.bias", FAMILIES[family]) in file.tensors for part in parts)


def gguf_values(file: GgufFile) -> dict[str, Any]:
    """Return the model's values as config.json would have them. Raises as `gguf_config` does."""
    kind, name = file.fields.get("general.type", "model"), file.fields.get("general.architecture")
    if kind != "model":
        raise UnsupportedTarget(f"this GGUF file is of type {kind!r}, not a model")
    family = next((each for each, entry in FAMILIES.items() if entry.gguf == name), "")
    if not family:
        TargetConfig.from_json({"model_type": name})
    keys = _Keys(file)
    keys.check()
    heads, width = keys.number("attention.head_count"), keys.number("embedding_length")
    key_length = keys.get("attention.key_length", 0)
    head_dim = keys.number("attention.key_length") if key_length else int(width // max(heads, 1))
    rotary = keys.get("rope.dimension_count", head_dim)
    for other, value in (("attention.value_length", keys.get("attention.value_length", head_dim)),
                         ("rope.dimension_count", head_dim if FAMILIES[family].partial else rotary)):  # fmt: skip
        if value != head_dim:
            raise UnsupportedTarget(f"{name}.{other} {value} beside heads of {head_dim} is not supported")
    own = {theirs: keys.get(key) for key, theirs in _OWN.get(str(name), {}).items() if keys.get(key) is not None}
    if isinstance(pattern := own.get("sliding_window_pattern"), list):
        own["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
    options = _rope_scaling(keys)
    if "llama_4_scaling_beta" in own:
        options["llama_4_scaling_beta"] = own.pop("llama_4_scaling_beta")
    values = {
        "model_type": family,
        "vocab_size": len(file.fields.get("tokenizer.ggml.tokens", [])) or keys.number("vocab_size"),
        "hidden_size": width,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.number("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_parameters": options,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "sliding_window": None,
        "attention_bias": _biased(file, family, "self_attn.q_proj", "self_attn.o_proj"),
        "mlp_bias": _biased(file, family, "mlp.gate_proj", "mlp.down_proj"),
        **own,
    }
    if options.get("rope_type") == "longrope":  # phi3 has it in both places
        values["original_max_position_embeddings"] = options["original_max_position_embeddings"]
    if FAMILIES[family].partial:
        values["partial_rotary_factor"] = rotary / head_dim
    if FAMILIES[family].multipliers:
        values["attention_multiplier"] = keys.get("attention.scale", 0) or head_dim**-0.5
    if family == "gemma3_text":  # only the 27B model's scores are not scaled by the heads' width
        values["query_pre_attn_scalar"] = width // heads if keys.get("block_count") == 62 else head_dim
    return values


class _Keys:
    """The keys that begin with the family's name."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self._family = file, str(file.fields.get("general.architecture"))

    def check(self) -> None:
        """Raise UnsupportedTarget for an unknown key that would change something."""
        prefix, read = f"{self._family}.", {*_READ.split(), *_OWN.get(self._family, {})}
        for name, value in self.file.fields.items():
            key = name.removeprefix(prefix)
            if key != name and key not in read and value not in _NEUTRAL.get(key, ()):
                raise UnsupportedTarget(f"a GGUF file with {name} = {str(value)[:40]} is not supported")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value, or `default`."""
        return self.file.fields.get(f"{self._family}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number, or the one that a list for all layers agrees on. Raises BrokenTarget if there is none."""
        value = self.get(key, default)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedTarget(f"a GGUF file with layers of different {self._family}.{key} is not supported")
        if not isinstance(value, int | float) or not math.isfinite(value):
            what = "lacks" if value is None else f"has {str(value)[:40]!r} for"
            raise BrokenTarget(f"{self.file.path}: its metadata {what} {self._family}.{key}")
        return value


def _long_rope(short: NDArray[np.float32], long: NDArray[np.float32], trained: int, gain: float) -> dict[str, Any]:
    """Return LongRoPE in the form of config.json; with equal factors it is the kind for texts of any length."""
    return {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": trained,
        "attention_factor": gain,
    }


def _rope_scaling(keys: _Keys) -> dict[str, Any]:
    """Return `rope_scaling` in the form of config.json."""
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0)) or 1.0
    kind = keys.get("rope.scaling.type") or "linear"  # the meaning of a factor without a type
    divisors = [keys.file.values(name) for name in rope_tensors(keys.file)]
    if len(divisors) == 1:
        if kind not in ("linear", "none"):
            raise UnsupportedTarget(f"a GGUF file with {_COMMON} and {kind} scaling is not supported")
        common = divisors[0] * (factor if kind == "linear" else 1.0)
        return _long_rope(common, common, keys.number("context_length"), 1.0)
    if divisors:
        trained = keys.number("rope.scaling.original_context_length")
        return _long_rope(divisors[0], divisors[1], trained, keys.number("rope.scaling.attn_factor", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedTarget(f"a GGUF file with rotary scaling of type {kind!r} is not supported")
    options: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        for key, name in (
            ("original_context_length", "original_max_position_embeddings"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if (value := keys.get(f"rope.scaling.{key}")) is not None:
                options[name] = value
        if (gain := keys.get("rope.scaling.attn_factor", 1.0)) != 1.0:
            options["attention_factor"] = gain * (1.0 + 0.1 * math.log(factor))
        if log := keys.get("rope.scaling.yarn_log_multiplier", 0):
            options |= {"mscale": 1.0, "mscale_all_dim": float(log)}
    return options
