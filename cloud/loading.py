"""Load the verifier that the settings describe."""

from __future__ import annotations

import time

from cloud import log
from cloud.auth import Accounts
from cloud.service import Verifier
from cloud.settings import Settings


def load_verifier(settings: Settings) -> Verifier:
    """Load target, drafter and accounts, and time steps. Raises TargetError, DrafterError or AuthError (one line).

    With settings.tp > 1 only rank 0 returns; the others follow it until it ends, then raise SystemExit(0).
    """
    from cloud.torch_engine.loading import load_model

    accounts = Accounts(settings.auth_file)
    begun = time.perf_counter()
    model = load_model(settings)
    log.info("loaded", model=settings.model, dtype=settings.dtype, seconds=round(time.perf_counter() - begun, 1))
    verifier = Verifier(model, settings, accounts)
    if not settings.tree_budget:
        verifier.calibrate()
    return verifier
