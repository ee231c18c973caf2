"""A verifier whose steps take at least a stated time, to stand for a larger target on a faster machine.

    python -m benchmarks.slow_target --step-ms 60 --drafter drafters/smollm2-135m-instruct-moa --port 8765

Everything else is `python -m cloud.verifier`, whose options follow. Text and acceptance are the small target's own;
only time is added, the same for a token and for a tree, as on a machine where memory bandwidth limits a step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cloud import loading, verifier
from cloud.engine.choice import EngineName
from cloud.engine.runner import Logits, ModelRunner
from cloud.engine.served_model import ServedModel
from cloud.settings import Settings
from cloud.telemetry.progress import BuildProgress
from outrider_core.targets.part import Part
from outrider_core.targets.source import TargetSource


class SlowRunner:
    """`ModelRunner` whose steps take at least a given time."""

    def __init__(self, runner: ModelRunner, seconds: float) -> None:
        self._runner, self._seconds = runner, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, parts: Sequence[Part]) -> Logits:
        """See ModelRunner.forward."""
        end = time.perf_counter() + self._seconds
        logits = self._runner.forward(parts)
        time.sleep(max(0.0, end - time.perf_counter()))
        return logits


def slow_down(seconds: float) -> None:
    """Let every step of the verifiers that this process loads take at least this long."""
    load = loading.load_model

    def loaded(
        settings: Settings, source: TargetSource, engine: EngineName, progress: BuildProgress | None = None
    ) -> ServedModel:
        model = load(settings, source, engine, progress)
        return replace(model, runner=SlowRunner(model.runner, seconds))

    loading.load_model = loaded


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_target", description=__doc__, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--step-ms", type=float, required=True, help="ms a step takes at least")
    options, rest = parser.parse_known_args(argv)
    slow_down(options.step_ms / 1000)
    return verifier.main(rest)


if __name__ == "__main__":
    sys.exit(main())
