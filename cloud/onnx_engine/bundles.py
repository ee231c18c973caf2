"""The target bundle to be served: whether this machine can run it, and where it is."""

from __future__ import annotations

from cloud.telemetry.progress import LogLines, Making
from outrider_core.models.identity import model_identity
from outrider_core.models.target import TargetError, find_source
from outrider_core.targets.bundle import MANIFEST_FILE, TargetBundle, TargetBundleError, open_target_bundle
from outrider_core.targets.cached import cached_folder, cached_target
from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.products import check_products
from outrider_core.targets.weights import BrokenWeights


def find_bundle(name: str, making: Making | None = None) -> TargetBundle:
    """The bundle of target `name`, opened, or from the cache, or made now. making: is told; None: the log is.

    Raises TargetBundleError, TargetError, or UnsupportedTarget where this machine would compute it wrongly.
    """
    told = making or LogLines()
    bundle = cached_target(name, lambda step, steps: told.step(step + 1, steps), told.waiting)
    check_products(bundle.products.read_bytes())
    return bundle


def why_unsupported(name: str) -> str | None:
    """Why target `name` cannot be served from a bundle on this machine; None where it can. Raises TargetError."""
    source = find_source(name)
    folder = cached_folder(name, model_identity(source))
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
