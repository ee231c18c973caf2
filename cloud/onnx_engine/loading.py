"""Load a target bundle and a drafter's server half."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from cloud.engine.features import NoServerHalf
from cloud.engine.runner import FeatureProducer
from cloud.engine.served_model import ServedModel
from cloud.onnx_engine.runner import OnnxModelRunner
from cloud.settings import Settings
from cloud.telemetry.progress import BuildProgress, LogLines
from outrider_core.cache import expanded
from outrider_core.chat.tokenizer import ChatTokenizer, open_chat_tokenizer
from outrider_core.machine import available_cores
from outrider_core.models.drafter_arrays import Arrays, check_target, read_drafter
from outrider_core.models.host_features import HostFeatures
from outrider_core.models.moa_config import MoAConfig
from outrider_core.targets.bundle import TargetBundle, TargetBundleError
from outrider_core.targets.cached import runnable_target
from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.memory import give_back
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.source import TargetError, TargetSource


def load_model(settings: Settings, source: TargetSource, progress: BuildProgress | None = None) -> ServedModel:
    """Load the target in `source`, and the drafter if the settings name one.

    progress: reports while an 8-bit copy of the target is built; None: in the log. Raises TargetError or
    DrafterError with one line.
    """
    drafter = read_drafter(expanded(settings.drafter)) if settings.drafter else None
    reports = progress or LogLines()
    if drafter and not source.prepared:  # checked before a bundle is made
        check_target(drafter[0].target_hash, source.name, source.identity, settings.drafter or "")
    try:
        bundle = runnable_target(source, lambda step, steps: reports.step(step + 1, steps), reports.waiting)
    except TargetBundleError as error:
        raise TargetError(str(error)) from None
    except UnsupportedTarget as error:
        raise TargetError(f"{source.name}: {error}; use --engine torch") from None
    model = onnx_model(bundle, drafter, settings)
    if not source.prepared:
        model = replace(model, name=source.name)
    del drafter
    give_back()
    return model


def onnx_model(bundle: TargetBundle, drafter: tuple[MoAConfig, Arrays, str] | None, settings: Settings) -> ServedModel:
    """Prepare an open bundle and a drafter for serving.

    Raises DrafterError if the drafter belongs to another target.
    """
    shape, threads = bundle.config, settings.threads or default_threads()
    drafter_hash, features = "", cast("FeatureProducer", NoServerHalf())
    if drafter:
        config, tensors, drafter_hash = drafter
        check_target(config.target_hash, bundle.name, bundle.source_hash, settings.drafter or "")
        config.check_fits(shape, bundle.name)
        features = HostFeatures(config, tensors)
    runner = OnnxRunner.of(bundle, settings.kv_tokens, threads)
    return ServedModel(
        name=bundle.name,
        target_hash=bundle.source_hash,
        drafter_hash=drafter_hash,
        arithmetic=bundle.arithmetic,
        tokenizer=_tokenizer(bundle),
        eos_ids=bundle.eos_ids,
        vocab_size=shape.vocab_size,
        max_positions=bundle.max_positions,
        runner=OnnxModelRunner(runner),
        features=features,
        exact=True,
    )


def default_threads() -> int:
    """Return all cores but one, which the sockets need; both of two: between two messages a step leaves them free."""
    cores = available_cores()
    return cores if cores <= 2 else cores - 1


def _tokenizer(bundle: TargetBundle) -> ChatTokenizer:
    try:
        return open_chat_tokenizer(bundle.folder)
    except (OSError, ValueError) as error:
        raise TargetError(f"{bundle.name}: {error}; a fast tokenizer, tokenizer.json, is needed") from None
