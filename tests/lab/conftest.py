"""The drafter lab on a tiny random target, with a drafter of each kind."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cloud.loading import load_verifier
from cloud.settings import Settings
from export.train.features import Sequence
from export.train.training_set import TrainingSet
from lab.baselines.files import VARIANTS
from lab.contenders import BaselineContender, Contender, MoAContender, VariantContender
from lab.kinds import KINDS
from lab.lab import Lab
from outrider_core.models.drafter_files import write_drafter
from outrider_core.models.layers import tables_of
from outrider_core.models.target import Target, load_target
from outrider_core.targets.source import TargetSource
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a drafter of each kind."""
    folder = tmp_path_factory.mktemp("lab")
    model = tiny_model(dtype=torch.float32)
    save_tiny_drafter(folder / "moa", model, save_tiny_target(folder / "target", model))
    target = load_target(TargetSource.resolve(str(folder / "target")), dtype="float32")
    data = TrainingSet(target, [Sequence(list(range(4, 60)), ((2, 56),))], layers=2, draft_vocab=64, max_context=256)
    for kind in ("eagle2", "eagle3", "lm", *VARIANTS):
        student = data.student(KINDS[kind])
        with torch.no_grad():
            for parameter in student.parameters():
                if parameter.requires_grad and parameter.dim() > 1:
                    parameter.normal_(0, 0.25)
        write_drafter(folder / kind, kind, asdict(student.config), student.trained(), {})
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(TargetSource.resolve(str(folder / "target")), dtype="float32")


@pytest.fixture(scope="module")
def lab(folder: Path) -> Lab:
    settings = Settings(
        model=str(folder / "target"), drafter=folder / "moa", dtype="float32", device="cpu", threads=1, tree_budget=12,
        max_model_len=256, max_nodes=64, kv_tokens=1024, max_sessions=4,
    )  # fmt: skip
    return Lab(load_verifier(settings))


@pytest.fixture(scope="module")
def contenders(folder: Path, target: Target) -> dict[str, Contender]:
    tables = tables_of(target.model)
    made: dict[str, Contender] = {"moa": MoAContender("moa", folder / "moa", tables)}
    made |= {kind: VariantContender(kind, folder / kind, tables) for kind in VARIANTS}
    made |= {kind: BaselineContender(kind, folder / kind, tables) for kind in ("eagle2", "eagle3", "lm")}
    return made
