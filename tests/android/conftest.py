"""All of these tests need a Java runtime and the pinned tools: `make test-android` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from android_demo.ci import app, core
from android_demo.ci.engines import Libraries
from cloud.torch_engine.process import VerifierProcess
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.android.device import MAX_CONTEXT, verifier_of, words
from tests.android.phone import MAX_NEW, PROMPT
from tests.tiny import plain_decode, save_tiny_drafter, save_tiny_target, tiny_model

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("android")
            item.add_marker(pytest.mark.timeout(900))  # the first one may download and compile


@pytest.fixture(scope="session")
def tools() -> core.Toolchain:
    return core.Toolchain.fetched()


@pytest.fixture(scope="session")
def classpath(tools: core.Toolchain) -> list[Path]:
    """The compiled library, its tests and what they need."""
    return core.build_tests(tools)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random target, a drafter of nearly all its tokens, and their bundle."""
    root = tmp_path_factory.mktemp("tiny")
    folders = {name: root / name for name in ("target", "drafter", "bundle")}
    model = tiny_model(seed=5, dtype=torch.float32)
    save_tiny_drafter(folders["drafter"], model, save_tiny_target(folders["target"], model), torch.arange(3, 199))
    write_bundle(
        BundleOptions(
            target=TargetSource.resolve(str(folders["target"])),
            drafter=folders["drafter"],
            output_dir=folders["bundle"],
            quant="fp32",
        )
    )
    return folders


@pytest.fixture(scope="session")
def app_classpath(tools: core.Toolchain) -> list[Path]:
    """The app's own logic, compiled, its tests and what they need."""
    return app.build_tests(tools, Libraries.fetched())


@pytest.fixture(scope="session")
def wanted(folders: dict[str, Path]) -> str:
    """What the target says to the phone's question: plain decoding."""
    model = load_target(TargetSource.resolve(str(folders["target"])), "float64").model
    return words(plain_decode(model, PROMPT, Sampling(), MAX_NEW, max_context=MAX_CONTEXT))


@pytest.fixture(scope="session")
def verifier(folders: dict[str, Path]) -> Iterator[VerifierProcess]:
    server = verifier_of(folders)
    server.start()
    server.wait_ready()
    yield server
    server.stop()
