"""A verifier whose steps take at least a stated time, to stand for a larger target on a faster machine.

    python -m benchmarks.slow_target --step-ms 60 --drafter drafters/smollm2-135m-instruct-moa --port 8765

Everything else is `python -m cloud.verifier`, whose options follow. Text and acceptance are the small target's own;
only time is added, the same for a token and for a tree, as on a machine where memory is what a step waits for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from cloud import verifier
from cloud.torch_engine import runner
from cloud.torch_engine.drawing import TorchLogits
from outrider_core.targets.part import Part


def slow_down(seconds: float) -> None:
    """Let every step of this process take at least this long."""
    forward = runner.TorchRunner.forward

    def slowed(self: runner.TorchRunner, parts: Sequence[Part]) -> TorchLogits:
        end = time.perf_counter() + seconds
        logits = forward(self, parts)
        time.sleep(max(0.0, end - time.perf_counter()))
        return logits

    runner.TorchRunner.forward = slowed  # type: ignore[method-assign]


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
