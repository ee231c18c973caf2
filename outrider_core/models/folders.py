"""Where trained drafters lie. Loads nothing heavy."""

from __future__ import annotations

from pathlib import Path

from outrider_core.targets.source import DEFAULT_TARGET


def drafters_folder() -> Path:
    """The drafters that come with the package: inside an installed wheel, or in the checkout's `drafters/`."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "drafters"
    return installed if installed.is_dir() else package.parent / "drafters"


def default_drafter() -> Path:
    """The drafter folder of the default target."""
    return drafters_folder() / f"{DEFAULT_TARGET}-moa"
