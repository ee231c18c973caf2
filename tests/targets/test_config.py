"""Shapes and rotary tables are those of `transformers`; what is not computed here is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider_core.targets.config import TargetConfig, UnsupportedTarget
from tests.tiny import FAMILIES, tiny_model

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def values(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = tiny_model(dtype=torch.float32).config.to_dict()
    return {**config, **changes}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_shapes_of_every_family(family: str) -> None:
    model = tiny_model(family, heads=4, kv_heads=2, head_dim=16, tied=True, dtype=torch.float32)
    config = TargetConfig.from_json(model.config.to_dict())
    names = dict(model.named_parameters())
    assert (config.num_key_value_heads, config.head_dim, config.group) == (2, 16, 2)
    assert config.tie_word_embeddings and config.vocab_size == 199
    assert config.attention_bias == ("model.layers.0.self_attn.q_proj.bias" in names)
    assert config.output_bias == ("model.layers.0.self_attn.o_proj.bias" in names)
    assert config.head_norms == ("model.layers.0.self_attn.q_norm.weight" in names)


@pytest.mark.parametrize("kind", list(ROPES))
def test_rotary_tables_are_those_of_transformers(kind: str) -> None:
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 50_000.0, **ROPES[kind]},
    )
    rotary = LlamaRotaryEmbedding(theirs)
    expected = rotary(torch.zeros(1, 1, 1), torch.arange(256)[None])
    config = TargetConfig.from_json(
        values(max_position_embeddings=256, rope_parameters={"rope_theta": 50_000.0, **ROPES[kind]})
    )
    for table, reference in zip(config.rope.tables(256, 32), expected, strict=True):
        np.testing.assert_allclose(table, reference[0, :, :16].numpy(), atol=5e-5)


def test_old_spelling_of_rotary_scaling() -> None:
    plain = values(rope_theta=10_000.0, rope_scaling={"type": "linear", "factor": 2.0})
    plain.pop("rope_parameters", None)
    rope = TargetConfig.from_json(plain).rope
    assert (rope.theta, rope.kind, rope.options["factor"]) == (10_000.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"sliding_window": 128}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear attention"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' need short_factor"),
        ({"rope_parameters": {"rope_type": "su", "factor": 2.0}}, "'su' are not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "need factor"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedTarget, match=words):
        TargetConfig.from_json(values(**changes))
