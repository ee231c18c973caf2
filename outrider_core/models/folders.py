"""Folders of trained drafters. Loads nothing heavy."""

from __future__ import annotations

from pathlib import Path

from outrider_core.targets.source import DEFAULT_TARGET


def drafters_folder() -> Path:
    """Return the folder of the package's drafters: inside an installed wheel, or `drafters/` in the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "drafters"
    return installed if installed.is_dir() else package.parent / "drafters"


def default_drafter() -> Path:
    """Return the drafter folder of the default target."""
    return drafters_folder() / f"{DEFAULT_TARGET}-moa"
