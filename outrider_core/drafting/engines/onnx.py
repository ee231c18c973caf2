"""Run the device half with ONNX Runtime on the CPU."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from outrider_core.drafting.bundle import BundleError
from outrider_core.drafting.engines import INPUTS, OUTPUTS, Floats, Ints, one_line


class OnnxEngine:
    """An ONNX file of a bundle. Raises BundleError if ONNX Runtime refuses it. threads: 0 = all cores."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_cpu_mem_arena = False  # as fast here, and smaller: the arena grows by doubling
        # Spinning threads would burn a phone's battery, and a laptop's core, between steps.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises its own kinds without a common base
            raise BundleError(f"{path} does not load: {one_line(error)}") from None
        takes = [value.name for value in self.session.get_inputs()]
        gives = [value.name for value in self.session.get_outputs()]
        for verb, found, wanted in (("takes", takes, INPUTS), ("gives", gives, OUTPUTS)):
            if sorted(found) != sorted(wanted):
                raise BundleError(f"{path} {verb} {', '.join(found)} instead of {', '.join(wanted)}; export it again")

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        """Compute one draft step, see `outrider_core.drafting.engines.Engine`."""
        inputs = (tokens, positions, wanted, sa_mask, sa_keys, sa_values, row_keys, row_values)
        logits, keys, values = self.session.run(OUTPUTS, dict(zip(INPUTS, inputs, strict=True)))
        return logits, keys, values
