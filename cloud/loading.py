"""Load the verifier that the settings describe."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from cloud.engine.choice import EngineName, choose_engine
from cloud.engine.served_model import ServedModel
from cloud.engine.tree_budget import StepCosts
from cloud.server.accounts import Accounts
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.telemetry import log
from cloud.telemetry.progress import BuildProgress
from outrider_core.cache import expanded, why_inaccessible
from outrider_core.drafting.ngrams import NgramsError, NgramTable
from outrider_core.models.drafter_arrays import drafter_of_target
from outrider_core.models.moa_config import DrafterError
from outrider_core.targets.source import TargetError, TargetSource

#: tree budget if another server runs the target
UPSTREAM_NODES = 8
#: step costs of a verifier from an earlier start, if they are known
CostsOf = Callable[[Verifier], StepCosts | None]


def load_verifier(
    settings: Settings, progress: BuildProgress | None = None, costs_of: CostsOf = lambda verifier: None
) -> Verifier:
    """Load target, drafter and accounts, and time steps. progress: see `load_model`. costs_of: known step costs.

    Raises TargetError, DrafterError or AuthError with one line.
    """
    try:
        return _load(settings, progress, costs_of)
    except OSError as error:  # of the cache, or of the target's files
        raise TargetError(f"{settings.model}: {why_inaccessible(error)}") from None


def _load(settings: Settings, progress: BuildProgress | None, costs_of: CostsOf) -> Verifier:
    accounts = Accounts(settings.auth_file)
    begun = time.perf_counter()
    source = TargetSource.resolve(settings.model)
    choice = choose_engine(settings, source)
    model = load_model(settings, source, choice.engine, progress)
    seconds = round(time.perf_counter() - begun, 1)
    log.info(
        "loaded",
        model=settings.model,
        engine=choice.engine,
        arithmetic=model.arithmetic,
        why=choice.why,
        seconds=seconds,
    )
    if model.top and not settings.tree_budget:  # another server's steps are not timed, as other clients share them
        settings = settings.model_copy(update={"tree_budget": UPSTREAM_NODES})
    verifier = Verifier(model, settings, accounts)
    if not settings.tree_budget:
        verifier.calibrate(costs_of(verifier))
    return verifier


def load_model(
    settings: Settings, source: TargetSource, engine: EngineName, progress: BuildProgress | None = None
) -> ServedModel:
    """Load the target in `source` and the drafter, if there is one, on this engine.

    progress: reports while an 8-bit copy of the target is built; None: in the log. Raises TargetError or DrafterError.
    """
    if settings.drafter is None:
        settings = settings.model_copy(update={"drafter": drafter_of_target(source.identity)})
    if engine == "onnx":
        from cloud.onnx_engine.loading import load_model as load_onnx

        model = load_onnx(settings, source, progress)
    elif engine == "upstream":
        from cloud.upstream_engine.loading import load_model as load_upstream

        model = load_upstream(settings, source)
    elif engine == "vllm":
        from cloud.vllm_engine.loading import load_model as load_vllm

        model = load_vllm(settings, source)
    else:
        from cloud.torch_engine.loading import load_model as load_torch

        model = load_torch(settings, source)
    if settings.drafter is None:
        return model
    try:
        ngrams = NgramTable.load(expanded(settings.drafter), model.vocab_size)
    except NgramsError as error:
        raise DrafterError(str(error)) from None
    return replace(model, ngrams=ngrams)
