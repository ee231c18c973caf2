"""ONNX Runtime's arm64 kernels on an x86-64 Linux machine: its Linux library of the Android version, under qemu.

A phone's own library cannot run there (it needs Android's C library, whose thread-local data qemu's user mode lacks),
but this one has the same sources and kernels. All tools are pinned: zig is the cross compiler.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from android_demo.ci import core
from android_demo.ci.engines import Libraries
from android_demo.ci.pins import REPOSITORY
from android_demo.ci.store import provided

PROGRAM = Path(__file__).with_name("arm64_steps.c")
OUTPUT = REPOSITORY / "build" / "android" / "arm64"
#: processors to try: without the dot product instruction, with it, and with everything that qemu knows (int8 matrices
#: too)
PROCESSORS = ("cortex-a53", "cortex-a76", "max")


def unavailable() -> str | None:
    """Return why this machine cannot run them, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "qemu and zig are pinned for x86-64 Linux alone"
    return None


@dataclass(frozen=True)
class Arm64:
    """The compiled program (arm64_steps.c) and its environment. root: the C library; onnx: folder of ONNX Runtime."""

    qemu: Path
    root: Path
    onnx: Path
    program: Path

    @classmethod
    def built(cls, libraries: Libraries) -> Arm64:
        """Return it from the cache, or fetch and compile it now. Raises FetchError or BuildError."""
        folder = provided("arm64")
        root = OUTPUT / "root"
        shutil.rmtree(OUTPUT, ignore_errors=True)
        for name in ("libc6-arm64-cross", "libgcc-s1-arm64-cross", "libstdc++6-arm64-cross"):
            shutil.copytree(folder[name] / "usr" / "aarch64-linux-gnu", root, symlinks=True, dirs_exist_ok=True)
        (onnx,) = (folder["onnxruntime"] / "onnxruntime" / "capi").glob("libonnxruntime.so.*")
        shutil.copyfile(onnx, root / "lib" / "libonnxruntime.so.1")
        zig = folder["ziglang"] / "ziglang" / "zig"
        zig.chmod(0o755)
        program = OUTPUT / "steps"
        headers = libraries.onnx_natives.parent / "headers"
        command = [zig, "cc", "-target", "aarch64-linux-gnu.2.28", "-O1", "-w", f"-I{headers}", PROGRAM,
                   root / "lib" / "libonnxruntime.so.1", "-o", program]  # fmt: skip
        cache = {"ZIG_GLOBAL_CACHE_DIR": str(OUTPUT / "zig"), "ZIG_LOCAL_CACHE_DIR": str(OUTPUT / "zig")}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, **cache})
        if done.returncode:
            raise core.BuildError(f"zig ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return cls(folder["qemu-user-static"] / "usr" / "bin" / "qemu-aarch64-static", root, root / "lib", program)

    def run(self, processor: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the program on `processor` with these arguments; never raises."""
        command = [self.qemu, "-cpu", processor, "-L", self.root, "-E", f"LD_LIBRARY_PATH={self.onnx}", self.program]
        return subprocess.run([*map(str, command), *arguments], capture_output=True, text=True)
