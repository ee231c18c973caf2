"""Every family: a folder and a GGUF file of the same model hold the same weights and describe the same computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider_core.models.target import load_target
from outrider_core.targets.config import TargetConfig, UnsupportedTarget
from outrider_core.targets.families import FAMILIES
from outrider_core.targets.source import TargetError, TargetSource
from outrider_core.targets.streamed import final_states, head_logits
from outrider_core.targets.weights import GgufWeights, folder_weights
from tests.targets.gguf_files import (
    LLAMA,
    llama_arrays,
    llama_fields,
    paired,
    random_arrays,
    tokenizer_fields,
    write_gguf,
)
from tests.tiny import VARIANTS, tiny_model

VOCAB = 300


class Converted(NamedTuple):
    """What llama.cpp's converter makes of a family. keys: behind its name. names: unlike Llama's. offset: of norms."""

    name: str
    keys: Mapping[str, Any] = {}
    names: Mapping[str, str] = {}
    pairs: bool = False
    offset: float = 0.0
    tensors: Mapping[str, list[float]] = {}


LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
POST = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
CONVERTED = {
    "llama": Converted("llama", pairs=True),
    "qwen2": Converted("qwen2"),
    "qwen3": Converted("qwen3"),
    "smollm3": Converted("smollm3", {"rope.freq_base": 2_000_000.0}, pairs=True),
    "granite": Converted(
        "granite",
        {"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.2, "logit_scale": 2.0},
        pairs=True,
    ),
    "ministral3": Converted(
        "mistral3",
        {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1,
        },
        pairs=True,
    ),
    "olmo2": Converted("olmo2", names=POST),
    "phi3": Converted(
        "phi3",
        {
            "rope.dimension_count": 4, "rope.scaling.original_context_length": 128, "attention.sliding_window": 7,
            "rope.scaling.attn_factor": 1.1338934,
        },
        names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        tensors={"rope_factors_short": [1.5, 1.5], "rope_factors_long": [3.0, 3.0]},
    ),
    "gemma3_text": Converted(
        "gemma3",
        {
            "rope.freq_base": 1_000_000.0, "rope.freq_base_swa": 10_000.0, "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [True, False],
        },
        names={**POST, "pre_feedforward_layernorm": "ffn_norm"},
        offset=1.0,
    ),
}  # fmt: skip


def gguf_of(model: Any, path: Path, kind: Converted) -> Path:
    names, stored = {**LLAMA_NAMES, **kind.names}, {}
    tied = model.config.tie_word_embeddings
    for full, tensor in model.state_dict().items():
        values, (bare, _, suffix) = tensor.numpy(), full.rpartition(".")
        if tied and bare == "lm_head":
            continue
        part = bare.split(".", 3)[3] if bare.startswith("model.layers.") else bare
        block = f"blk.{bare.split('.')[2]}." if part != bare else ""
        if kind.pairs and part in ("self_attn.q_proj", "self_attn.k_proj"):
            values = paired(values, 4 if part.endswith("q_proj") else 2)
        stored[f"{block}{names[part]}.{suffix}"] = values + np.float32(kind.offset * part.endswith("norm"))
    stored |= {f"{name}.weight": np.array(values, np.float32) for name, values in kind.tensors.items()}
    keys = {
        "block_count": 2, "context_length": 512, "embedding_length": 32, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
        "attention.layer_norm_rms_epsilon": float(model.config.rms_norm_eps), "rope.dimension_count": 8, **kind.keys,
    }  # fmt: skip
    fields = {**{f"{kind.name}.{name}": value for name, value in keys.items()}, **tokenizer_fields()}
    return write_gguf(path, fields, stored, kind.name)


@pytest.mark.parametrize("family", CONVERTED)
def test_a_gguf_file_is_its_folder(tmp_path: Path, family: str) -> None:
    model = tiny_model(family, vocab=VOCAB, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    theirs, config = folder_weights(tmp_path)
    ours = GgufWeights(gguf_of(model, tmp_path / "model.gguf", CONVERTED[family]))
    for name in config.tensors():
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))
    for table, expected in zip(
        ours.config.rope.tables(128, config.rotary_width), config.rope.tables(128, config.rotary_width), strict=True
    ):
        np.testing.assert_allclose(table, expected, atol=1e-6)
    same = {"rope": config.rope, "rms_norm_eps": config.rms_norm_eps}
    if family == "gemma3_text":  # by the heads' width there; another number in this folder
        same["attention_scale"] = config.attention_scale
    if family == "smollm3":  # every fourth layer there, another one in this folder
        same |= {name: getattr(config, name) for name in ("unrotated_layers", "windowed_layers", "sliding_window")}
    numbers = {name: pytest.approx(value) for name, value in vars(config).items() if isinstance(value, float)}
    assert vars(replace(ours.config, **same)) == {**vars(config), **numbers}


@pytest.mark.parametrize("family", CONVERTED)
def test_torch_computes_what_a_gguf_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    model = tiny_model(family, vocab=VOCAB, dtype=torch.float32)
    if family == "gemma3_text":  # as GGUF files have it
        model.config.query_pre_attn_scalar = 8
        for layer in model.model.layers:
            layer.self_attn.scaling = 8**-0.5
    if family == "smollm3":  # likewise
        model.config.layer_types = ["full_attention"] * 2
        for layer in model.model.layers:
            layer.self_attn.use_rope, layer.self_attn.sliding_window = True, None
    loaded = load_target(TargetSource.resolve(str(gguf_of(model, tmp_path / "model.gguf", CONVERTED[family]))))
    assert loaded.model.config.architectures == [type(model).__name__]
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_torch_has_the_biases_and_rotary_factors_of_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which transformers' own reader leaves out: its answers are another model's."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    arrays = random_arrays(replace(TargetConfig.from_json(LLAMA), attention_bias=True, mlp_bias=True))
    stored = llama_arrays(arrays) | {"rope_freqs.weight": np.array([1, 1, 3, 8], np.float32)}
    path = write_gguf(tmp_path / "model.gguf", llama_fields(), stored)
    source = TargetSource.resolve(str(path))
    ids = list(range(5, 45))
    weights = GgufWeights(path)
    wanted = head_logits(weights, weights.config, final_states(weights, weights.config, [ids])[0])
    with torch.inference_mode():
        found = load_target(source).model(torch.tensor([ids])).logits[0].numpy()
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)(torch.tensor([ids])).logits[0]
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.abs(theirs.numpy() - wanted).max() > 1


def test_what_torch_does_not_have_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    arrays = random_arrays(TargetConfig.from_json(LLAMA))
    path = write_gguf(tmp_path / "model.gguf", llama_fields(attention__scale=0.5), llama_arrays(arrays))
    with pytest.raises(TargetError, match=r"torch's model of type 'llama' has no attention_scale 0\.5, which"):
        load_target(TargetSource.resolve(str(path)))


def test_every_family_is_tried() -> None:
    known = {family.partition("-")[0] for family in VARIANTS} | {"llama"}
    assert known == set(FAMILIES)
    assert {FAMILIES[family].gguf for family in CONVERTED} == {each.gguf for each in FAMILIES.values() if each.gguf}


def test_smollm3_has_no_rotary_positions_in_every_fourth_layer() -> None:
    values = {**LLAMA, "model_type": "smollm3", "num_hidden_layers": 9}
    assert TargetConfig.from_json(values).unrotated_layers == (3, 7)


def test_gemma_sees_all_in_every_sixth_layer() -> None:
    values = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 64, "rope_theta": 5e5}
    config = TargetConfig.from_json(values)
    assert config.windowed_layers == (0, 1, 2, 3, 4, 6)
    assert config.window_rope and (config.rope.theta, config.window_rope.theta) == (5e5, 1e4)


def test_longrope_ends_where_other_factors_begin() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = TargetConfig.from_json({**LLAMA, "rope_scaling": rope, "original_max_position_embeddings": 64})
    assert config.max_position_embeddings == 64


HYBRID = {"model_type": "granitemoehybrid"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (HYBRID | {"num_local_experts": 0, "layer_types": ["mamba", "attention"]}, "without experts and recurrent"),
        (HYBRID | {"num_local_experts": 4, "layer_types": ["attention"] * 2}, "without experts and recurrent"),
        ({"model_type": "qwen3_moe"}, "mixtures of experts; vLLM serves it"),
        ({"model_type": "gpt_oss"}, "mixtures of experts; vLLM serves it"),
        ({"model_type": "lfm2"}, "recurrent or convolutions; vLLM serves it"),
        ({"model_type": "qwen3_5"}, "recurrent or convolutions; vLLM serves it"),
        ({"model_type": "gemma3"}, "images too"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, "part of each head"),
    ],
)  # fmt: skip
def test_what_is_computed_otherwise_is_refused_in_one_line(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedTarget, match=says):
        TargetConfig.from_json({**LLAMA, "hidden_act": None, **values})
