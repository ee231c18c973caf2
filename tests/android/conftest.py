"""All of these tests need a Java runtime and the pinned tools: `make test-android` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from android_demo.ci import core

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("android")


@pytest.fixture(scope="session")
def tools() -> core.Toolchain:
    return core.Toolchain.fetched()


@pytest.fixture(scope="session")
def classpath(tools: core.Toolchain) -> list[Path]:
    """The compiled library, its tests and what they need."""
    return core.build_tests(tools)
