"""A verifier whose engine breaks when a file says so; everything else is `python -m cloud.verifier`.

    python -m tests.cloud.faulty_verifier FAULT ...

The file FAULT is read before each step. `fail`: the forward raises, as after a CUDA error. `hang`: it does not return.
`die`: the engine thread ends. Without the file all is well.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from cloud import verifier
from cloud.torch_engine import runner
from cloud.torch_engine.drawing import TorchLogits
from outrider_core.targets.part import Part


class Death(BaseException):
    """Ends a thread, past every handler of its own."""


def break_engine(file: Path) -> None:
    """Let the engine of this process read its faults from `file`."""
    forward = runner.TorchRunner.forward

    def faulty(self: runner.TorchRunner, parts: Sequence[Part]) -> TorchLogits:
        fault = file.read_text() if file.exists() else ""
        if fault == "fail":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if fault == "hang":
            threading.Event().wait()
        if fault == "die":
            raise Death
        return forward(self, parts)

    runner.TorchRunner.forward = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    break_engine(Path(sys.argv[1]))
    sys.exit(verifier.main(sys.argv[2:]))
