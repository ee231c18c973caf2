"""The default target, loaded once."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from models.target import Target, load_target

# a busy machine may take its time
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")


@pytest.fixture(scope="session")
def default_target() -> Target:
    """The real default model in float32 (converted on first use, then in the user's cache)."""
    return load_target()
