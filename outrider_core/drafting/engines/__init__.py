"""Engines that run the device half. All drafting state is the caller's; an engine is one pure function."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider_core.drafting.bundle import Bundle, BundleError

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

#: additive mask value that hides a key from a query
MASKED = np.float32(-1e9)

#: engine -> packages that can run it, best first, and what to install if there is none
RUNTIMES = {
    "onnx": (("onnxruntime",), "onnxruntime"),
    "executorch": (("executorch_numpy_runtime", "executorch"), "outrider[executorch]"),
}
INPUTS = ("tokens", "positions", "wanted", "sa_mask", "sa_keys", "sa_values", "row_keys", "row_values")
OUTPUTS = ("logits", "new_keys", "new_values")


class Engine(Protocol):
    """Computes one draft step. Engines raise BundleError if the file or the runtime cannot be used."""

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        """Compute one draft step. Shapes as in outrider_core.models.moa.DeviceHalf.forward.

        tokens, positions [n]; wanted [w]; sa_mask additive [n, past + n]; sa_keys, sa_values
        [past, kv_heads, head_dim]; row_keys, row_values [m, kv_heads, head_dim], m >= 1 -> (logits
        [w, draft_vocab], new keys, new values [n, kv_heads, head_dim]).
        """
        ...


class NoDrafter:
    """Replaces the engine of a bundle without a drafter: it proposes nothing, so lookup alone makes the trees.

    It knows one token, whose logit is -inf.
    """

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        """Compute one draft step, see `Engine`."""
        nothing = np.zeros((len(tokens), *sa_keys.shape[1:]), np.float32)
        return np.full((len(wanted), 1), -np.inf, np.float32), nothing, nothing


def installed(name: str) -> str | None:
    """Return the package that would run engine `name` here, or None."""
    return next((package for package in RUNTIMES[name][0] if find_spec(package)), None)


def open_engine(bundle: Bundle, name: str | None = None, threads: int = 0) -> Engine:
    """Open engine `name` of `bundle`; without a name the first of RUNTIMES that is in it and installed.

    threads: 0 = all cores. Raises BundleError with one clear line.
    """
    held = bundle.manifest.engines
    if not held:
        return NoDrafter()
    if name is None:
        known = [n for n in RUNTIMES if n in held] or list(held)
        name = next((n for n in known if n in RUNTIMES and installed(n)), known[0])
    if name not in held:
        raise BundleError(f"{bundle.folder} holds no {name} engine (it has: {', '.join(held)})")
    if name not in RUNTIMES:
        raise BundleError(f"{bundle.folder}: engine {name!r} is unknown here (known: {', '.join(RUNTIMES)}); update")
    if not installed(name):
        raise BundleError(f"nothing here runs {held[name].file}; run: pip install '{RUNTIMES[name][1]}'")
    path = bundle.path(held[name].file)
    try:
        if name == "onnx":
            from outrider_core.drafting.engines.onnx import OnnxEngine

            return OnnxEngine(path, threads)
        from outrider_core.drafting.engines.executorch import ExecuTorchEngine

        return ExecuTorchEngine(path, threads)
    except ImportError as error:
        package = RUNTIMES[name][1]
        raise BundleError(f"{installed(name)} does not import: {one_line(error)}; install {package} again") from None


def one_line(error: Exception) -> str:
    """Return the error's text without line breaks; runtimes add hints and stack traces below."""
    return " ".join(str(error).split())[:300]
