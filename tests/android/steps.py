"""Draft steps that Python and the JVM both run, and the JVM's results."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from android_demo.ci import core
from outrider_core.drafting.bundle import Manifest
from outrider_core.drafting.engines import MASKED, Floats, Ints

Step = tuple[Ints, Ints, Ints, Floats, Floats, Floats, Floats, Floats]
#: (width, wanted, past, rows): nothing behind it, a branch, a prompt's chunk, trees, and the widest
SHAPES = [(1, 1, 0, 1), (5, 5, 7, 9), (32, 1, 128, 33), (8, 8, 512, 200), (1, 1, 700, 1), (64, 64, 1000, 300)]


def random_steps(manifest: Manifest, shapes: Sequence[tuple[int, int, int, int]] = SHAPES, seed: int = 0) -> list[Step]:
    rng = np.random.default_rng(seed)

    def rows(count: int, heads: int) -> Floats:
        return rng.standard_normal((count, heads, manifest.head_dim)).astype(np.float32)

    steps: list[Step] = []
    for width, wanted, past, seen in shapes:
        positions = np.arange(past, past + width)
        mask = np.where(np.arange(past + width) > positions[:, None], MASKED, np.float32(0))
        steps.append(
            (rng.integers(0, manifest.vocab_size, width), positions, np.arange(width - wanted, width), mask,
             rows(past, manifest.sa_kv_heads), rows(past, manifest.sa_kv_heads), rows(seen, manifest.ca_kv_heads),
             rows(seen, manifest.ca_kv_heads))
        )  # fmt: skip
    return steps


@dataclass(frozen=True)
class Runner:
    """Runs steps in a JVM of its own (android_demo/engines, Steps.kt). options: of the JVM."""

    classpath: list[Path]
    options: list[str]
    folder: Path

    def run(
        self, bundle: Path, engine: str, steps: Sequence[Step] = (), threads: int = 1
    ) -> subprocess.CompletedProcess[str]:
        """What became of it; an error's line is the last one of standard error."""
        self.write(steps)
        files = [str(self.folder / name) for name in ("steps", "results")]
        program = ["dev.outrider.engines.StepsKt", str(bundle), engine, str(threads), *files]
        return subprocess.run(core.java(self.classpath, *self.options, *program), capture_output=True, text=True)

    def write(self, steps: Sequence[Step]) -> None:
        """To the file `steps`, as Steps.kt has it."""
        with (self.folder / "steps").open("wb") as file:
            for step in steps:
                file.write(np.array([len(step[0]), len(step[2]), len(step[4]), len(step[6])], "<i4").tobytes())
                for array in step:
                    file.write(np.ascontiguousarray(array).tobytes())

    def results(self, like: Sequence[Sequence[Floats]]) -> list[list[Floats]]:
        """Each step's logits, keys and values, in the shapes of `like`."""
        data = np.fromfile(self.folder / "results", "<f4")
        sizes = [array.size for arrays in like for array in arrays]
        assert len(data) == sum(sizes)
        parts = iter(np.split(data, np.cumsum(sizes)[:-1]))
        return [[next(parts).reshape(array.shape) for array in arrays] for arrays in like]
