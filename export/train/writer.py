"""Choose what writes a target's answers: torch, or on a CPU the target's 8-bit copy, several times as fast."""

from __future__ import annotations

from export.progress import Meter
from export.train.train_options import TrainOptions
from outrider_core.targets.bundle import MANIFEST_FILE, TargetBundle, TargetBundleError
from outrider_core.targets.cached import runnable_target
from outrider_core.targets.config import UnsupportedTarget

#: number of conversations that make a copy worthwhile
WORTH_A_COPY = 500


def writing_copy(options: TrainOptions, left: int) -> TargetBundle | None:
    """Return the target's 8-bit copy, made if it is missing, if it should answer the `left` conversations."""
    if options.writer == "torch" or (options.writer == "auto" and options.torch_device() != "cpu"):
        return None
    try:
        options.target.shape()
        made = (options.target.bundle_folder() / MANIFEST_FILE).is_file()
        if options.writer == "auto" and not made and left < WORTH_A_COPY:
            return None
        with Meter("8-bit copy of the target, %", 100) as meter:

            def done(step: int, steps: int) -> None:
                meter.update(100 * step // steps, "")

            return runnable_target(options.target, done, lambda: print("waiting for another process that makes it"))
    except (UnsupportedTarget, TargetBundleError) as error:
        if options.writer == "onnx":
            raise ValueError(f"--writer onnx: {error}; use --writer torch") from None
        return None
