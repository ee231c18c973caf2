"""What writes a target's answers: torch, or on a CPU the target's 8-bit copy, which is several times as fast."""

from __future__ import annotations

from export.progress import Meter
from export.train.train_options import TrainOptions
from outrider_core.models.identity import model_identity
from outrider_core.models.target import find_source
from outrider_core.targets.bundle import MANIFEST_FILE, TargetBundle, TargetBundleError
from outrider_core.targets.cached import cached_folder, cached_target
from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.convert import check_source
from outrider_core.targets.products import check_products

#: conversations for which it pays to make the copy
WORTH_A_COPY = 500


def writing_copy(options: TrainOptions, left: int) -> TargetBundle | None:
    """The target's 8-bit copy, made where it is not in the cache, if that is to answer the `left` conversations."""
    if options.writer == "torch" or (options.writer == "auto" and options.torch_device() != "cpu"):
        return None
    try:
        source = find_source(options.target)
        check_source(source)
        made = (cached_folder(options.target, model_identity(source)) / MANIFEST_FILE).is_file()
        if options.writer == "auto" and not made and left < WORTH_A_COPY:
            return None
        with Meter("8-bit copy of the target, %", 100) as meter:

            def done(step: int, steps: int) -> None:
                meter.update(100 * step // steps, "")

            bundle = cached_target(options.target, done, lambda: print("waiting for another process that makes it"))
        check_products(bundle.products.read_bytes())
    except (UnsupportedTarget, TargetBundleError) as error:
        if options.writer == "onnx":
            raise ValueError(f"--writer onnx: {error}; use --writer torch") from None
        return None
    return bundle
