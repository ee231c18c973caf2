"""Target bundles of this machine: found in the cache, or made there at first start."""

from __future__ import annotations

from pathlib import Path

from cloud.progress import LogLines, Making
from outrider_core.cache import cache_dir
from outrider_core.models.identity import model_identity
from outrider_core.models.target import TargetError, eos_ids_of, find_source
from outrider_core.protocol.wire import MAX_TOKENS
from outrider_core.targets.bundle import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TargetBundle,
    TargetBundleError,
    open_target_bundle,
)
from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.products import check_products
from outrider_core.targets.weights import BrokenWeights


def find_bundle(name: str, making: Making | None = None) -> TargetBundle:
    """The bundle of target `name`, from the cache or made now. making: is told; None: the log is.

    Raises TargetBundleError, TargetError, or UnsupportedTarget where this machine would compute it wrongly.
    """
    source = find_source(name)
    identity = model_identity(source)
    folder = _folder(name, identity)
    if (folder / MANIFEST_FILE).is_file():
        bundle = open_target_bundle(folder)
    else:
        from outrider_core.targets.convert import make_target_bundle  # takes memory, so only where it is needed

        told = making or LogLines()
        bundle = make_target_bundle(
            name, source, identity, folder, MAX_TOKENS, eos_ids_of(source) if source.is_dir() else (),
            lambda layer, layers: told.layer(layer + 1, layers), told.waiting,
        )  # fmt: skip
    check_products(bundle.products.read_bytes())
    return bundle


def why_unsupported(name: str) -> str | None:
    """Why target `name` cannot be served from a bundle on this machine; None where it can. Raises TargetError."""
    source = find_source(name)
    folder = _folder(name, model_identity(source))
    try:
        if (folder / MANIFEST_FILE).is_file():
            check_products(open_target_bundle(folder).products.read_bytes())
        else:
            from outrider_core.targets.convert import check_source
            from outrider_core.targets.products import products_graph

            check_source(source)
            check_products(products_graph())
    except UnsupportedTarget as error:
        return str(error)
    except TargetBundleError as error:
        raise TargetError(str(error)) from None
    except (BrokenWeights, ValueError, OSError, KeyError) as error:
        raise TargetError(f"{name}: the files in {source} do not load: {error}") from None
    return None


def _folder(name: str, identity: str) -> Path:
    return cache_dir() / "target-bundles" / f"{Path(name).name}-{identity}-v{FORMAT_VERSION}"
