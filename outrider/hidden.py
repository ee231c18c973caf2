"""Detect folders of an app that hide this product's packages, as others use names like `cloud` and `export` too."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("outrider_core", "edge_runtime", "cloud", "export")
HOME = Path(__file__).resolve().parents[1]


def hidden_package(error: ImportError | None = None) -> str | None:
    """Return what hides one of the packages and what to do, in one line; None if nothing does.

    error: an import that failed; only its package is checked.
    """
    for name in PACKAGES:
        if error is not None and (error.name or "").partition(".")[0] != name:
            continue
        spec = find_spec(name)
        if spec is None:
            continue
        place = Path(spec.origin or next(iter(spec.submodule_search_locations or ()), "")).resolve()
        if HOME not in place.parents:
            folder = place.parent if place.name == "__init__.py" else place
            return (
                f"{folder} comes before Outrider's own package {name!r} on Python's search path; rename it, or start "
                "where it is not in the way"
            )
    return None
