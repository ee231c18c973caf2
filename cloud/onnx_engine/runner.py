"""`cloud.engine.runner.ModelRunner` over a lowered target."""

from __future__ import annotations

from collections.abc import Sequence

from cloud.engine.drawing import HostLogits
from cloud.engine.runner import ModelRunner
from outrider_core.targets.part import Part
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.weights import Floats


class OnnxModelRunner(ModelRunner):
    """Runs the target in this process, on the CPU."""

    def __init__(self, runner: OnnxRunner) -> None:
        self._runner = runner

    def forward(self, parts: Sequence[Part]) -> HostLogits:
        """See ModelRunner.forward."""
        return HostLogits(self._runner.forward(parts))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner.move."""
        self._runner.move(sources, targets)

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Floats:
        """See ModelRunner.gather."""
        return self._runner.gather(layers, rows)

    def rest(self) -> None:
        """See ModelRunner.rest."""
        self._runner.rest()
