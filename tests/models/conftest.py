"""The default target, loaded once."""

from __future__ import annotations

import pytest

from outrider_core.models.target import Target, load_target


@pytest.fixture(scope="session")
def default_target() -> Target:
    """The real default model in float32 (converted on first use, then in the user's cache)."""
    return load_target()
