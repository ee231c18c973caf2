"""The tiny stack's folders, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from export.bundle import write_bundle
from export.plan import Options
from outrider_core.drafting.bundle import Bundle, open_bundle
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    target, drafter, bundle = root / "target", root / "drafter", root / "bundle"
    model = tiny_model(seed=5, dtype=torch.float32)
    save_tiny_drafter(drafter, model, save_tiny_target(target, model))
    write_bundle(Options(str(target), drafter, bundle, quant="fp32"))
    return target, drafter, bundle


@pytest.fixture(scope="session")
def bundle(folders: tuple[Path, Path, Path]) -> Bundle:
    return open_bundle(folders[2])
