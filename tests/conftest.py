"""Settings of every test."""

from __future__ import annotations

import signal

import torch
from hypothesis import HealthCheck, settings

# Tiny models gain nothing from a second thread, and on a busy machine they wait for it at every operator.
torch.set_num_threads(1)

# A shell that runs the tests in the background lets them ignore Ctrl-C; the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# a busy machine may take its time
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")
