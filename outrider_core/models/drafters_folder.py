"""Where trained drafters lie. Free of torch, so that settings and help texts can name the default drafter at once."""

from __future__ import annotations

from pathlib import Path

_CORE = Path(__file__).resolve().parents[1]


def drafters_folder() -> Path:
    """The folder that holds one folder per drafter: the installed package's own, or else the checkout's `drafters/`."""
    installed = _CORE / "drafters"
    return installed if installed.is_dir() else _CORE.parent / "drafters"
