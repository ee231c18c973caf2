"""A tiny target folder and a drafter for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model

# a busy machine may take its time
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")


@dataclass(frozen=True)
class Folders:
    target: Path
    drafter: Path
    target_hash: str


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("export")
    model = tiny_model(dtype=torch.float32)
    target_hash = save_tiny_target(root / "target", model)
    save_tiny_drafter(root / "drafter", model, target_hash)
    return Folders(root / "target", root / "drafter", target_hash)
