"""All of these tests need a Java runtime and the pinned tools: `make test-android` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from android_demo.ci import app, core
from android_demo.ci.engines import Libraries
from export.bundle.verifier_process import VerifierProcess
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.android.device import KOTLIN_TESTS, MAX_CONTEXT, tiny_folders, verifier_of, words
from tests.android.phone import MAX_NEW, PROMPT
from tests.tiny import plain_decode, tiny_model

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("android")
            item.add_marker(pytest.mark.timeout(900))  # the first one may download and compile


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many Kotlin tests ran, as they are one test here."""
    reports = terminalreporter.getreports("passed")
    counts = [value for report in reports for name, value in report.user_properties if name == KOTLIN_TESTS]
    if counts:
        terminalreporter.write_line(f"Kotlin: {sum(map(int, counts))} passed, 0 failed")


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
    return tiny_folders(tmp_path_factory.mktemp("tiny"), tiny_model(seed=5, dtype=torch.float32))


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
