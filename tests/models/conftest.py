"""The default target, loaded once, and a tiny one as a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider_core.models.target import Target, load_target
from outrider_core.targets.source import TargetSource
from tests.tiny import save_tiny_target


@pytest.fixture(scope="session")
def default_target() -> Target:
    """The real default model in float32 (converted on first use, then in the user's cache)."""
    return load_target(TargetSource.resolve())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    save_tiny_target(folder)
    return folder


@pytest.fixture
def tiny(saved: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target that a test may break."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))
