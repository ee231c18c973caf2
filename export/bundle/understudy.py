"""Put an understudy into a bundle: a complete model with the target's vocabulary, for offline writing."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from outrider_core.drafting.bundle import UNDERSTUDY_FOLDER, BundleError, UnderstudyEntry
from outrider_core.targets.bundle import MANIFEST_FILE, TargetBundleError
from outrider_core.targets.cached import cached_target
from outrider_core.targets.source import TargetSource

#: least share of the target's tokens that an understudy must have
LEAST_SHARED = 0.99


def write_understudy(
    source: TargetSource,
    bundle: Path,
    max_context: int,
    done: Callable[[int, int], None] = lambda step, steps: None,
    bits: int = 8,
) -> UnderstudyEntry:
    """Put a model into the bundle's folder for it.

    bits: of its weights; a target bundle has its own. It comes from the cache, and is made there if missing. done(step,
    steps): called after every step of that. Raises BundleError and TargetError.
    """
    try:
        model = cached_target(source, done, bits=bits)
    except TargetBundleError as error:
        raise BundleError(f"--understudy {source.name}: {error}") from None
    if model.max_positions < max_context:
        raise BundleError(
            f"--understudy {source.name} reads {model.max_positions} tokens at most, and the bundle is for "
            f"{max_context}; export with --max-context {model.max_positions}, or choose another understudy"
        )
    own, wanted = _vocabulary(model.folder), _vocabulary(bundle)
    if why := _differ(own, wanted, model.config.vocab_size):
        raise BundleError(f"--understudy {source.name} has another vocabulary than the target: {why}")
    folder = bundle / UNDERSTUDY_FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted export's
    shutil.copytree(model.folder, folder, ignore=shutil.ignore_patterns("report.*"), copy_function=_link_or_copy)
    manifest = (folder / MANIFEST_FILE).read_bytes()
    return UnderstudyEntry(
        folder=UNDERSTUDY_FOLDER,
        name=model.name,
        source_hash=model.source_hash,
        format="onnx",
        bits=model.bits,
        bytes=sum(path.stat().st_size for path in folder.iterdir()),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        barred=sorted(index for text, index in own.items() if text not in wanted),
    )


def _link_or_copy(source: str, place: str) -> None:
    """Link a file if both paths are on one file system, else copy it: finished files are never changed."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


def _differ(own: dict[str, int], wanted: dict[str, int], rows: int) -> str:
    """Return why text in the target's ids is not valid for an understudy; "" if it is, except for a few added tokens.

    own, wanted: ids by text, of the understudy and of the target. rows: most ids that the understudy knows.
    """
    if moved := next((text for text in wanted if own.get(text, wanted[text]) != wanted[text]), None):
        return f"{moved!r} is {own[moved]}, and {wanted[moved]} there"
    texts = {index: text for text, index in wanted.items()}
    if renamed := next((text for text, index in own.items() if texts.get(index, text) != text), None):
        return f"token {own[renamed]} is {renamed!r}, and {texts[own[renamed]]!r} there"
    if (shared := len(wanted.keys() & own.keys())) < LEAST_SHARED * len(wanted):
        return f"it has {shared} of the {len(wanted)} tokens there"
    if max(wanted.values()) >= rows:
        return f"it has {rows} tokens, and the target has one of id {max(wanted.values())}"
    return ""


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return ids by text, in their order, without tokens that only pad the vocabulary to its table's rows."""
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    by_id = sorted(vocabulary.items(), key=lambda entry: entry[1])
    return {text: index for text, index in by_id if text != f"[PAD{index}]"}
