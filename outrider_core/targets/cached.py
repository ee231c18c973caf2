"""Target bundles of this machine: found in the cache, or made there. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider_core.cache import cache_dir
from outrider_core.models.identity import model_identity
from outrider_core.models.target import eos_ids_of, find_source
from outrider_core.protocol.wire import MAX_TOKENS
from outrider_core.targets.bundle import (
    EXPORT_AGAIN,
    FORMAT_VERSION,
    MANIFEST_FILE,
    TargetBundle,
    open_target_bundle,
    prepared_target,
)


def cached_target(
    name: str,
    done: Callable[[int, int], None] = lambda step, steps: None,
    waiting: Callable[[], None] = lambda: None,
    bits: int = 8,
) -> TargetBundle:
    """The bundle of target `name`, from the cache or made now.

    name: alias, Hugging Face id, folder or GGUF file; or a bundle's folder, which is opened, whatever its bits. done,
    waiting, bits: see `make_target_bundle`. Raises TargetBundleError and TargetError.
    """
    if prepared := prepared_target(name):
        return open_target_bundle(prepared, EXPORT_AGAIN)
    source = find_source(name)
    identity = model_identity(source)
    folder = cached_folder(name, identity, bits)
    if (folder / MANIFEST_FILE).is_file():
        return open_target_bundle(folder)
    from outrider_core.targets.convert import make_target_bundle  # takes memory, so only where it is needed

    eos_ids = eos_ids_of(source) if source.is_dir() else ()
    return make_target_bundle(shown_name(name), source, identity, folder, MAX_TOKENS, eos_ids, done, waiting, bits=bits)


def cached_folder(name: str, identity: str, bits: int = 8) -> Path:
    """Where the bundle of a target lies once it is made. identity: `model_identity` of its files."""
    kind = "" if bits == 8 else f"-{bits}bit"
    return cache_dir() / "target-bundles" / f"{Path(name).name}-{identity}-v{FORMAT_VERSION}{kind}"


def shown_name(name: str) -> str:
    """Bundles travel, and a folder's place on this machine is nobody's business."""
    return Path(name).name if Path(name).exists() else name
