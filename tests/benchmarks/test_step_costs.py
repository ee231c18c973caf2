"""Steps of a tiny target are timed in turns, and every session verifies the shape that its row names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import step_costs
from outrider_core.protocol.tree import TokenTree
from tests.cloud.drive import FOR_VLLM
from tests.cloud.running import save_folder


@pytest.mark.parametrize("engines", [["torch", "onnx"], pytest.param(["torch", "vllm"], marks=pytest.mark.vllm)])
def test_every_shape_is_timed_on_every_engine(engines: list[str], tmp_path: Path, throwaway_cache: None) -> None:
    folder = save_folder(tmp_path, **(FOR_VLLM if "vllm" in engines else {}))
    flags = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--json", str(tmp_path / "json")]
    asked = ["--engines", *engines, "--sessions", "1", "2", "--nodes", "12", "--repeats", "1"]
    assert step_costs.main([*flags, *asked]) == 0
    figures = json.loads((tmp_path / "json").read_text())
    rows = [(row["sessions"], row["shape"], row["tokens"]) for row in figures["steps"]]
    shapes = [("plain", 1), ("chain of 6", 7), ("12 nodes in 6 paths", 13)]
    assert rows == [(count, shape, count * tokens) for count in (1, 2) for shape, tokens in shapes]
    assert all(row[f"{name}_wall_ms"] > 0 for row in figures["steps"] for name in engines)


def test_the_shapes_are_as_they_are_called() -> None:
    for shape, paths in (("12 nodes in 6 paths", 6), ("24 nodes in 12 paths", 12), ("chain of 6", 1)):
        parents = step_costs.SHAPES[shape]
        assert len(list(TokenTree(tuple(range(len(parents))), tuple(parents)).paths())) == paths
