"""Run the device half with ONNX Runtime on the CPU."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_runtime.bundle import Bundle, BundleError

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class OnnxEngine:
    """`drafter.onnx` of a bundle. Raises BundleError if ONNX Runtime refuses the file."""

    def __init__(self, bundle: Bundle, threads: int = 0) -> None:
        entry = bundle.manifest.engines.get("onnx")
        if entry is None:
            raise BundleError(f"{bundle.folder} holds no ONNX engine (it has: {', '.join(bundle.manifest.engines)})")
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # Spinning threads would burn a phone's battery, and a laptop's core, between steps.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self.session = ort.InferenceSession(
                str(bundle.path(entry.file)), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises its own kinds without a common base
            raise BundleError(f"{bundle.path(entry.file)} does not load: {error}") from None

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        rows: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        """One draft step; shapes as in models.moa.DeviceHalf.forward.

        tokens, positions [n]; wanted [w]; sa_mask additive [n, past + n]; sa_keys, sa_values
        [past, kv_heads, head_dim]; rows [m, 2, kv_heads, head_dim] -> (logits [w, draft_vocab],
        new keys, new values [n, kv_heads, head_dim]).
        """
        logits, keys, values = self.session.run(
            ["logits", "new_keys", "new_values"],
            {
                "tokens": tokens,
                "positions": positions,
                "wanted": wanted,
                "sa_mask": sa_mask,
                "sa_keys": sa_keys,
                "sa_values": sa_values,
                "rows": rows,
            },
        )
        return logits, keys, values
