"""The default bundle's 8-bit operators on arm64 processors with and without the instructions made for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from android_demo.ci import arm64
from android_demo.ci.engines import Libraries
from android_demo.ci.pins import REPOSITORY
from outrider_core.drafting.bundle import open_bundle
from outrider_core.drafting.engines import open_engine
from tests.android.steps import Runner, random_steps

DEFAULT = REPOSITORY / "build" / "bundle"
SHAPES = [(1, 1, 0, 1), (5, 5, 7, 9), (8, 8, 128, 33)]
#: arm64 kernels round activations elsewhere: a logit moves by up to 0.19 on average, and by 0.18 by int8 itself
MEAN_ERROR = 0.2
#: beside what all logits of a token have in common, which changes no probability
MEAN_ERROR_BESIDE_SHIFT = 0.09

pytestmark = [
    pytest.mark.skipif(not (DEFAULT / "manifest.json").is_file(), reason="no build/bundle; run: make test-android"),
    pytest.mark.skipif(arm64.unavailable() is not None, reason=str(arm64.unavailable())),
]


@pytest.fixture(scope="module")
def machine() -> arm64.Arm64:
    return arm64.Arm64.built(Libraries.fetched())


@pytest.mark.parametrize("processor", arm64.PROCESSORS)
def test_the_default_bundle_runs_on_arm64(machine: arm64.Arm64, tmp_path: Path, processor: str) -> None:
    bundle = open_bundle(DEFAULT)
    manifest, runner = bundle.manifest, Runner([], [], tmp_path)
    steps = random_steps(manifest, SHAPES)
    runner.write(steps)
    widths = map(str, (manifest.sa_kv_heads, manifest.ca_kv_heads, manifest.head_dim))
    files = map(str, (bundle.path(manifest.engines["onnx"].file), tmp_path / "steps", tmp_path / "results"))
    done = machine.run(processor, *files, *widths)
    assert done.returncode == 0, done.stderr
    engine = open_engine(bundle, "onnx", 1)
    wanted = [list(engine.step(*step)) for step in steps]
    for got, expected in zip(runner.results(wanted), wanted, strict=True):
        logits, best = got[0], expected[0].argmax(-1)
        moved = logits - expected[0]
        assert np.abs(moved).mean() <= MEAN_ERROR
        assert np.abs(moved - moved.mean(-1, keepdims=True)).mean() <= MEAN_ERROR_BESIDE_SHIFT
        assert (np.argpartition(-logits, 3, -1)[:, :4] == best[:, None]).any(-1).all()
        for one, other in zip(got[1:], expected[1:], strict=True):
            assert np.abs(one - other).max() <= 0.1


def test_a_model_that_does_not_load_says_why(machine: arm64.Arm64, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    (tmp_path / "steps").touch()
    files = [str(tmp_path / name) for name in ("model.onnx", "steps", "results")]
    done = machine.run("max", *files, "3", "3", "64")
    assert done.returncode == 1 and "Load model from" in done.stderr
