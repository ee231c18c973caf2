"""A verifier whose engine breaks when a file says so; everything else is `python -m cloud.verifier`.

    python -m tests.cloud.faulty_verifier FAULT ...

The file FAULT is read before each step. `fail`: the forward raises, as after a CUDA error. `hang`: it does not return.
`die`: the engine thread ends. Without the file all is well.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloud import loading, verifier
from cloud.engine.runner import Logits, ModelRunner
from outrider_core.targets.part import Part


class Death(BaseException):
    """Ends a thread, past every handler of its own."""


class FaultyRunner:
    """`ModelRunner` that reads its faults from `file`."""

    def __init__(self, runner: ModelRunner, file: Path) -> None:
        self._runner, self._file = runner, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, parts: Sequence[Part]) -> Logits:
        fault = self._file.read_text() if self._file.exists() else ""
        if fault == "fail":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if fault == "hang":
            threading.Event().wait()
        if fault == "die":
            raise Death
        return self._runner.forward(parts)


def break_engine(file: Path) -> None:
    """Let the engine of this process read its faults from `file`."""
    load = loading.load_model

    def loaded(*arguments: Any) -> Any:
        model = load(*arguments)
        return replace(model, runner=FaultyRunner(model.runner, file))

    loading.load_model = loaded


def main(argv: Sequence[str]) -> int:
    """FAULT, then the verifier's own flags."""
    break_engine(Path(argv[0]))
    return verifier.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
