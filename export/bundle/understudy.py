"""Put an understudy into a bundle: a complete model with the target's vocabulary, for writing without a link."""

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


def write_understudy(
    source: TargetSource,
    bundle: Path,
    max_context: int,
    done: Callable[[int, int], None] = lambda step, steps: None,
    bits: int = 8,
) -> UnderstudyEntry:
    """Put a model into the bundle's folder for it.

    bits: of its weights; a target bundle has its own. It comes from the cache, where it is made unless it is there.
    done(step, steps): after every step of that. Raises BundleError and TargetError.
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
    if _vocabulary(model.folder) != _vocabulary(bundle):
        raise BundleError(
            f"--understudy {source.name} has another vocabulary than the target; an understudy needs the same"
        )
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
    )


def _link_or_copy(source: str, place: str) -> None:
    """The same bytes on the disk where both lie on one file system: a finished file is never written to."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


def _vocabulary(folder: Path) -> dict[str, int]:
    vocabulary: dict[str, int] = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return vocabulary
