"""Target bundles of this machine: opened from the cache, or made there. No torch."""

from __future__ import annotations

from collections.abc import Callable

from outrider_core.cache import hold
from outrider_core.targets.bundle import (
    EXPORT_AGAIN,
    MADE_AGAIN,
    MANIFEST_FILE,
    TargetBundle,
    TargetBundleError,
    open_target_bundle,
)
from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.products import check_products, products_graph
from outrider_core.targets.source import TargetError, TargetSource


def cached_target(
    source: TargetSource,
    done: Callable[[int, int], None] = lambda step, steps: None,
    waiting: Callable[[], None] = lambda: None,
    bits: int = 8,
) -> TargetBundle:
    """Open a target's bundle from the cache, or make it now. A prepared bundle is opened whatever its bits.

    At 8 bits, weights are rounded to nearest; 4 bits are always calibrated, which takes minutes. While this process
    runs, `outrider models rm` does not remove the bundle.

    done, waiting, bits: see `make_target_bundle`. Raises TargetBundleError and TargetError.
    """
    folder = source.path if source.prepared else source.bundle_folder(bits)
    if source.prepared or (folder / MANIFEST_FILE).is_file():
        hold(folder)
        return open_target_bundle(folder, EXPORT_AGAIN if source.prepared else MADE_AGAIN)
    from outrider_core.targets.convert import make_target_bundle  # imported only here, as it takes memory

    made = make_target_bundle(source, folder, done=done, waiting=waiting, bits=bits)
    hold(folder)
    return made


def runnable_target(
    source: TargetSource,
    done: Callable[[int, int], None] = lambda step, steps: None,
    waiting: Callable[[], None] = lambda: None,
) -> TargetBundle:
    """Return `cached_target` with 8 bits. Raises UnsupportedTarget too, if this machine would compute it wrongly."""
    bundle = cached_target(source, done, waiting)
    check_products(bundle.products.read_bytes())
    return bundle


def why_unsupported(source: TargetSource) -> str | None:
    """Return why no 8-bit bundle of a model can run on this machine, or None. Raises TargetError."""
    folder = source.bundle_folder()
    try:
        if (folder / MANIFEST_FILE).is_file():
            check_products(open_target_bundle(folder).products.read_bytes())
        else:
            source.shape()
            check_products(products_graph())
    except UnsupportedTarget as error:
        return str(error)
    except TargetBundleError as error:
        raise TargetError(str(error)) from None
    return None
