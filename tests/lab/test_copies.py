"""The lab's comparison of a target's copies with float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lab import copies
from tests.tiny import save_tiny_target, tiny_model


def test_copies_are_compared_on_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    save_tiny_target(tmp_path / "target", tiny_model(hidden=64, dtype=torch.float32))
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in ("a b c", "d")))
    found = tmp_path / "found.json"
    asked = ["--target", tmp_path / "target", "--prompts", tmp_path / "some.jsonl", "--max-new-tokens", 40]
    assert copies.main([str(each) for each in (*asked, "--json", found, "--work-dir", tmp_path)]) == 0
    figures = json.loads(found.read_text())
    of = figures["copies"]
    assert 2 <= figures["tokens"] <= 80 and len(of) == 4
    assert of["float32"]["top1_agreement"] == 1 and abs(of["float32"]["divergence_bits"]) < 1e-5
    eight, nearest, calibrated = (of[name]["divergence_bits"] for name in list(of)[1:])
    assert 0 < eight < min(nearest, calibrated) and nearest != calibrated
    assert of["float32"]["bits_per_token"] > 0
