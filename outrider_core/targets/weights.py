"""A model's weights as float32 arrays, one at a time, from safetensors files or a GGUF file. No torch.

Names are those of `transformers`, without the leading "model." of decoder tensors: "embed_tokens", "norm", "lm_head",
"layers.3.self_attn.q_proj", ... ; a bias is named with the suffix ".bias".
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider_core.targets.config import TargetConfig, UnsupportedTarget

Floats = NDArray[np.float32]


class BrokenWeights(ValueError):
    """The files do not hold what their own headers say. One line that says what is wrong and what to do."""


class Weights(Protocol):
    """Where tensors come from."""

    def read(self, name: str) -> Floats:
        """Tensor `name` in float32, in the shape [outputs, inputs] or [outputs]. Raises BrokenWeights."""

    def __contains__(self, name: object) -> bool: ...


class SafetensorsWeights:
    """The tensors of a model folder's safetensors files, mapped into memory and converted when read."""

    _DTYPES: ClassVar = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, tuple[Path, dict[str, Any], int]] = {}
        for path in _safetensors_files(folder):
            header, start = _safetensors_header(path)
            for name, entry in header.items():
                if name != "__metadata__":
                    self._entries[name] = (path, entry, start)
        if not self._entries:
            raise BrokenWeights(f"{folder}: there are no *.safetensors files with tensors; download the model again")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._stored(name) in self._entries

    def read(self, name: str) -> Floats:
        """See Weights.read."""
        stored = self._stored(name)
        if stored not in self._entries:
            raise BrokenWeights(f"{self._folder}: there is no tensor {stored}; its layout is not that of a causal LM")
        path, entry, start = self._entries[stored]
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in self._DTYPES:
            raise BrokenWeights(f"{path}: tensor {stored} is stored as {dtype}, which is not supported")
        kind = np.dtype(self._DTYPES[dtype])
        count = int(np.prod(shape, dtype=np.int64))
        if end - begin != count * kind.itemsize or start + end > path.stat().st_size:
            raise BrokenWeights(f"{path}: tensor {stored} is cut short; download the file again")
        raw = np.memmap(path, kind, "r", start + begin, (count,)) if count else np.empty(0, kind)
        if dtype == "BF16":
            values: Floats = (raw.astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.astype(np.float32)
        return values.reshape(shape)

    @staticmethod
    def _stored(name: str) -> str:
        plain = name.endswith(".bias")
        full = name if plain else f"{name}.weight"
        return full if full.startswith("lm_head") else f"model.{full}"


def _safetensors_files(folder: Path) -> list[Path]:
    """The files of a model: model.safetensors, else those that its index names, else all. Raises BrokenWeights."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [folder / Path(name).name for name in named]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BrokenWeights(f"{index}: not an index of weights; download it again") from None
    if missing := [path.name for path in paths if not path.is_file()]:
        raise BrokenWeights(f"{folder}: {missing[0]} is missing, which {index.name} names; download it again")
    return paths


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """(header, where the data begins). Raises BrokenWeights."""
    with path.open("rb") as file:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < size <= 100_000_000:
            raise BrokenWeights(f"{path}: not a safetensors file; download it again")
        try:
            header: dict[str, Any] = json.loads(file.read(size))
        except ValueError:
            raise BrokenWeights(f"{path}: its header is damaged; download it again") from None
    return header, 8 + size


class GgufWeights:
    """The tensors of a GGUF file, dequantised when read."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(str(path))
        except Exception as error:  # the reader raises many kinds on damaged files
            raise BrokenWeights(f"{path}: not a GGUF file, or damaged: {error}") from None
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = self._config()

    @property
    def eos_ids(self) -> list[int]:
        """Token ids that end an answer."""
        end = self.field("tokenizer.ggml.eos_token_id")
        return [] if end is None else [int(end)]

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata field's value, or `default`."""
        found = self._reader.fields.get(name)
        return default if found is None else found.contents()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _gguf_name(name) in self._tensors

    def read(self, name: str) -> Floats:
        """See Weights.read."""
        from gguf.quants import dequantize

        stored = _gguf_name(name)
        if stored not in self._tensors:
            raise BrokenWeights(f"{self._path}: there is no tensor {stored}; its layout is not that of a causal LM")
        tensor = self._tensors[stored]
        try:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise BrokenWeights(f"{self._path}: tensor {stored} is stored as {kind}, which is not supported") from None
        shaped: Floats = values.reshape([int(size) for size in reversed(tensor.shape)])
        if self.config.family == "llama" and ".self_attn." in name:
            shaped = self._unpermuted(name, shaped)
        return shaped

    def _unpermuted(self, name: str, values: Floats) -> Floats:
        """GGUF stores Llama's query and key rows with the two halves of each rotary pair side by side."""
        part = name.rpartition("self_attn.")[2].partition(".")[0]
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}.get(part)
        if heads is None:
            return values
        paired = values.reshape(heads, self.config.head_dim // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)

    def _config(self) -> TargetConfig:
        family = self.field("general.architecture")

        def get(name: str, default: Any = None) -> Any:
            value = self.field(f"{family}.{name}", default)
            if value is None:
                raise BrokenWeights(f"{self._path}: its metadata lacks {family}.{name}")
            return value

        scaling = self.field(f"{family}.rope.scaling.type", "none")
        if scaling not in ("none", "") or "rope_freqs.weight" in self._tensors:
            raise UnsupportedTarget("a GGUF file with scaled rotary positions is not supported; use the model folder")
        heads = int(get("attention.head_count"))
        values = {
            "model_type": family,
            "vocab_size": len(self.field("tokenizer.ggml.tokens", [])) or int(get("vocab_size")),
            "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": self.field(f"{family}.attention.key_length"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": get("context_length"),
            "rope_theta": get("rope.freq_base", 10_000.0),
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }
        return TargetConfig.from_json(values)


_GGUF_PARTS = {
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
_GGUF_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def _gguf_name(name: str) -> str:
    bare, suffix = (name[: -len(".bias")], ".bias") if name.endswith(".bias") else (name, ".weight")
    if bare in _GGUF_NAMES:
        return _GGUF_NAMES[bare] + suffix
    _, layer, part = bare.split(".", 2)
    return f"blk.{layer}.{_GGUF_PARTS[part]}{suffix}"
