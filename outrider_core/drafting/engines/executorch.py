"""Run the device half with ExecuTorch (`drafter.pte`) from Python.

Two packages can: `executorch-numpy-runtime` (no torch, Python >= 3.12) and the `executorch` wheel, whose own
runtime brings torch into the process. On a phone neither is used: the app links ExecuTorch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from outrider_core.drafting.bundle import BundleError
from outrider_core.drafting.engines import INPUTS, OUTPUTS, Floats, Ints, installed, one_line

Execute = Callable[[list[Any]], list[Any]]


class ExecuTorchEngine:
    """A .pte file of a bundle. Raises BundleError if the runtime refuses it.

    threads: 0 = the runtime's choice. The whole process shares one thread pool, and only the `executorch` wheel can set
    it.
    """

    def __init__(self, path: Path, threads: int = 0) -> None:
        self._lock = Lock()
        package = installed("executorch")
        if not path.is_file():
            raise BundleError(f"{path} is missing; copy the whole folder or export again")
        load = _load_numpy if package == "executorch_numpy_runtime" else _load_torch
        try:
            self._execute, self._constant, self._methods = load(path, threads)
        except Exception as error:  # both runtimes raise bare RuntimeErrors
            reason = one_line(error)
            raise BundleError(f"{path} does not load with {package}: {reason}; export it for this version") from None

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Return what the file's constant methods (`get_vocab_size`, ...) return; None if this runtime cannot say."""
        return {name: self._constant(name) for name in sorted(self._methods - {"forward"})}

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        """Compute one draft step, see `outrider_core.drafting.engines.Engine`."""
        if not len(sa_keys):  # XNNPACK supports no empty tensors: one masked row stands for no past
            sa_keys = sa_values = np.zeros((1, *sa_keys.shape[1:]), np.float32)
            sa_mask = np.pad(sa_mask, ((0, 0), (1, 0)), constant_values=-1e9)
        inputs = (tokens, positions, wanted, sa_mask, sa_keys, sa_values, row_keys, row_values)
        with self._lock:  # one set of buffers, which the next step overwrites
            logits, keys, values = (x.copy() for x in self._execute([np.ascontiguousarray(x) for x in inputs]))
        return logits, keys, values


def _load_torch(path: Path, threads: int) -> tuple[Execute, Callable[[str], Any], set[str]]:
    import torch
    from executorch.runtime import Runtime

    if threads:
        from executorch.extension.pybindings import portable_lib

        portable_lib._unsafe_reset_threadpool(threads)
    program = Runtime.get().load_program(path)
    method = _loaded(program.load_method("forward"), "forward")
    if (method.metadata.num_inputs(), method.metadata.num_outputs()) != (len(INPUTS), len(OUTPUTS)):
        raise RuntimeError(f"it does not take {len(INPUTS)} inputs and give {len(OUTPUTS)} outputs")

    def execute(inputs: list[Any]) -> list[Any]:
        return [x.numpy() for x in method.execute([torch.from_numpy(x) for x in inputs])]

    def constant(name: str) -> Any:
        values = _loaded(program.load_method(name), name).execute([])
        return values[0] if len(values) == 1 else list(values)

    return execute, constant, set(program.method_names)


def _load_numpy(path: Path, threads: int) -> tuple[Execute, Callable[[str], Any], set[str]]:
    import executorch_numpy_runtime

    program = executorch_numpy_runtime.Runtime.get().load_program(str(path))
    method = program.load_method("forward")

    def constant(name: str) -> Any:
        try:
            values = program.load_method(name)([])
        except executorch_numpy_runtime.errors.ExecutionError:  # it has no strings
            return None
        return values[0] if len(values) == 1 else list(values)

    return method, constant, set(program.method_names)


def _loaded(method: Any, name: str) -> Any:
    if method is None:
        raise RuntimeError(f"it has no method `{name}`")
    return method
