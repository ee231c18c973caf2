"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# a busy machine may take its time
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")
