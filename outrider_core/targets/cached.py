"""Target bundles of this machine: found in the cache, or made there. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider_core.cache import cache_dir
from outrider_core.models.identity import model_identity
from outrider_core.models.target import eos_ids_of, find_source
from outrider_core.protocol.wire import MAX_TOKENS
from outrider_core.targets.bundle import FORMAT_VERSION, MANIFEST_FILE, TargetBundle, open_target_bundle


def cached_target(
    name: str,
    done: Callable[[int, int], None] = lambda step, steps: None,
    waiting: Callable[[], None] = lambda: None,
) -> TargetBundle:
    """The bundle of target `name` (alias, Hugging Face id, folder or GGUF file), from the cache or made now.

    done, waiting: see `make_target_bundle`. Raises TargetBundleError and TargetError.
    """
    source = find_source(name)
    identity = model_identity(source)
    folder = cached_folder(name, identity)
    if (folder / MANIFEST_FILE).is_file():
        return open_target_bundle(folder)
    from outrider_core.targets.convert import make_target_bundle  # takes memory, so only where it is needed

    eos_ids = eos_ids_of(source) if source.is_dir() else ()
    return make_target_bundle(_shown(name), source, identity, folder, MAX_TOKENS, eos_ids, done, waiting)


def cached_folder(name: str, identity: str) -> Path:
    """Where the bundle of a target lies once it is made. identity: `model_identity` of its files."""
    return cache_dir() / "target-bundles" / f"{Path(name).name}-{identity}-v{FORMAT_VERSION}"


def _shown(name: str) -> str:
    """Bundles travel, and a folder's place on this machine is nobody's business."""
    return Path(name).name if Path(name).exists() else name
