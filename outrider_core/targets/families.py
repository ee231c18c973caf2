"""Supported model families, each described by its differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A family's differences from Llama's decoder, beside what config.json says of each model.

    differs: in words, for the documentation. defaults: of keys that config.json may leave out, if they are not Llama's.
    biases: "config", as attention_bias and mlp_bias say; "attention", as attention_bias says; "inputs", of query, key
    and value; or "none". windows: "none"; "all" layers have one; "layers", as layer_types says. head_norms: each query
    and key head is normalised; joined_norms: all of them together. pre_norms: norms before a branch; post_norms: norms
    after it. gain_offset: added to the stored gains of a norm. multipliers: config.json has Granite's. partial: only a
    part of each head may be rotated. stored: other names that folders give to parts of a layer; parts with the same
    name are stored as its rows. gguf: the family's name in GGUF files; gguf_parts: as `stored`, there; gguf_pairs: rows
    of query and key are stored there with the two halves of each rotary pair side by side.
    """

    differs: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: str = "config"
    windows: str = "none"
    head_norms: bool = False
    joined_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    gain_offset: float = 0.0
    activation: str = "silu"
    multipliers: bool = False
    partial: bool = False
    stored: Mapping[str, str] = field(default_factory=dict)
    gguf: str = ""
    gguf_parts: Mapping[str, str] = field(default_factory=dict)
    gguf_pairs: bool = False


#: by model_type
FAMILIES = {
    "llama": Family("", gguf="llama", gguf_pairs=True),
    "qwen2": Family(
        "biases of query, key and value; sliding windows",
        {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False},
        biases="inputs",
        windows="layers",
        gguf="qwen2",
    ),
    "qwen3": Family(
        "norms of query and key heads; sliding windows",
        {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "use_sliding_window": False},
        biases="attention",
        windows="layers",
        head_norms=True,
        gguf="qwen3",
    ),
    "mistral": Family(
        "sliding windows", {"num_key_value_heads": 8, "sliding_window": 4096}, biases="none", windows="all"
    ),
    "smollm3": Family(
        "layers without rotary positions (NoPE); sliding windows",
        {
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        windows="layers",
        gguf="smollm3",
        gguf_pairs=True,
    ),
    "granite": Family(
        "multipliers of embeddings, branches, scores and logits", multipliers=True, gguf="granite", gguf_pairs=True
    ),
    "granitemoehybrid": Family(
        "as granite, if it has neither experts nor recurrent layers (Granite 4 dense)",
        biases="attention",
        multipliers=True,
        stored={
            "mlp.gate_proj": "shared_mlp.input_linear",
            "mlp.up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
        },
    ),
    "ministral3": Family(
        "queries that grow with their positions; sliding windows",
        {"num_key_value_heads": 8, "head_dim": 128},
        biases="none",
        windows="all",
        gguf="mistral3",
        gguf_pairs=True,
    ),
    "olmo2": Family(
        "norms after branches instead of before them; norms of queries and keys over all heads",
        biases="attention",
        joined_norms=True,
        pre_norms=False,
        post_norms=True,
        gguf="olmo2",
        gguf_parts={
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
    ),
    "phi3": Family(
        "rotary positions of a part of each head; LongRoPE, up to the context it was trained with; sliding windows",
        biases="none",
        windows="all",
        partial=True,
        stored={
            "self_attn.q_proj": "self_attn.qkv_proj",
            "self_attn.k_proj": "self_attn.qkv_proj",
            "self_attn.v_proj": "self_attn.qkv_proj",
            "mlp.gate_proj": "mlp.gate_up_proj",
            "mlp.up_proj": "mlp.gate_up_proj",
        },
        gguf="phi3",
        gguf_parts={
            "self_attn.q_proj": "attn_qkv",
            "self_attn.k_proj": "attn_qkv",
            "self_attn.v_proj": "attn_qkv",
            "mlp.gate_proj": "ffn_up",
        },
    ),
    "gemma3_text": Family(
        "norms before and after branches and of query and key heads; GeGLU; scaled embeddings; local layers with a "
        "sliding window and separate rotary positions",
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
        biases="attention",
        windows="layers",
        head_norms=True,
        post_norms=True,
        gain_offset=1.0,
        activation="gelu_pytorch_tanh",
        gguf="gemma3",
        gguf_parts={
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
    ),
}
#: why a family is not supported -> its names in config.json and in GGUF files
REFUSED = {
    "its layers are mixtures of experts": "qwen2_moe qwen2moe qwen3_moe qwen3moe mixtral gpt_oss gpt-oss granitemoe "
    "olmoe phimoe deepseek_v2 deepseek_v3 deepseek2 glm4_moe glm4moe llama4 llama4_text",
    "some of its layers are recurrent or convolutions": "lfm2 lfm2_moe lfm2moe qwen3_next qwen3next qwen3_5 "
    "qwen3_5_text qwen35 qwen3_5_moe qwen35moe falcon_h1 falcon-h1 mamba mamba2 jamba bamba nemotron_h granitehybrid",
    "it is laid out for images too": "gemma3 gemma3n mistral3 qwen2_vl qwen2vl qwen2_5_vl qwen3_vl qwen3vl gemma4",
}
