"""Load the verifier that the settings describe."""

from __future__ import annotations

import time

from cloud import log
from cloud.auth import Accounts
from cloud.served_model import ServedModel
from cloud.service import Verifier
from cloud.settings import Settings


def load_verifier(settings: Settings) -> Verifier:
    """Load target, drafter and accounts, and time steps.

    Raises TargetError, DrafterError or AuthError with one line. With settings.tp > 1 only rank 0
    returns; the others follow it until it ends, then raise SystemExit(0).
    """
    accounts = Accounts(settings.auth_file)
    begun = time.perf_counter()
    model = _load_model(settings)
    seconds = round(time.perf_counter() - begun, 1)
    log.info("loaded", model=settings.model, engine=settings.engine, dtype=settings.dtype, seconds=seconds)
    verifier = Verifier(model, settings, accounts)
    if not settings.tree_budget:
        verifier.calibrate()
    return verifier


def _load_model(settings: Settings) -> ServedModel:
    if settings.engine == "onnx":
        from cloud.onnx_engine.loading import load_model
    else:
        from cloud.torch_engine.loading import load_model
    return load_model(settings)
