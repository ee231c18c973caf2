"""GGUF files and model folders of a few kilobytes, with random weights. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import save_file

from outrider_core.targets.config import TargetConfig

Arrays = dict[str, NDArray[np.float32]]

#: a llama of 2 layers, 4 heads and 2 key and value heads of 8
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
#: the same in the metadata of a GGUF file
LLAMA_KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 8,
}


def alphabet() -> list[str]:
    """The characters by which byte-level tokenizers write the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tokenizer_fields(**changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer of 300 tokens. changes: by the names behind tokenizer.ggml, None: left out."""
    bytes_ = alphabet()
    merges = ["a b", "Ġ a", "1 2", "12 3", "Ġa b", "Ċ Ċ", "( x", "s e", "se l", "sel f"]
    words = [merge.replace(" ", "") for merge in merges]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
    fill = [f"<unused{number}>" for number in range(300 - len(bytes_) - len(words) - len(special))]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*bytes_, *words, *special, *fill],
        "token_type": [1] * (len(bytes_) + len(words)) + [3, 3, 3, 4] + [5] * len(fill),
        "merges": merges,
        "eos_token_id": len(bytes_) + len(words),
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def random_arrays(config: TargetConfig, seed: int = 0) -> Arrays:
    """Every tensor of a model by its name in TargetConfig.tensors."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(0, 0.3, shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in config.tensors().items()
    }


def write_gguf(
    path: Path,
    fields: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    family: str = "llama",
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    big: bool = False,
) -> Path:
    """fields: metadata by its whole name, None: left out. arrays: by their names there. kinds: of quantised ones."""
    writer = GGUFWriter(path, family, endianess=GGUFEndian.BIG if big else GGUFEndian.LITTLE)
    for name, value in fields.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, list(value))
    for name, array in arrays.items():
        writer.add_tensor(name, array, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_fields(tokenizer: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Metadata of LLAMA; `changes` by the names behind "llama.", with a dot written as two underscores."""
    keys = {**LLAMA_KEYS, **{name.replace("__", "."): value for name, value in changes.items()}}
    return {**{f"llama.{name}": value for name, value in keys.items()}, **(tokenizer or tokenizer_fields())}


def paired(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Query or key rows as llama.cpp's converter lays them."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def llama_arrays(arrays: Arrays) -> Arrays:
    """Arrays of LLAMA by their names in a GGUF file, with rows in pairs."""
    from outrider_core.targets.families import FAMILIES
    from outrider_core.targets.gguf_config import gguf_name

    heads = {"q_proj": 4, "k_proj": 2}
    stored = {}
    for name, values in arrays.items():
        part = name.removesuffix(".bias")[-6:]
        stored[gguf_name(name, FAMILIES["llama"])] = paired(values, heads[part]) if part in heads else values
    return stored


def write_folder(
    folder: Path, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], file: str = "model.safetensors"
) -> Path:
    """A model folder without a tokenizer; arrays by their names in TargetConfig.tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(values)))
    stored = {}
    for name, array in arrays.items():
        full = name if name.endswith(".bias") else f"{name}.weight"
        stored[full if full.startswith("lm_head") else f"model.{full}"] = np.ascontiguousarray(array)
    save_file(stored, folder / file)
    return folder
