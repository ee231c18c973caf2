"""The profile of a step counts each operator of the graph that ran."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from lab import operators
from tests.e2e.conftest import BUNDLE, needs_default_bundle


@needs_default_bundle
def test_every_node_of_the_graphs_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    asked = ["--bundle", str(BUNDLE), "--rows", "1", "3", "--drafter-rows", "2", "--steps", "2", "--json", str(found)]
    assert operators.main(asked) == 0
    steps = json.loads(found.read_text())["steps"]
    assert [(step["graph"], step["rows"]) for step in steps] == [("target", 1), ("target", 3), ("drafter", 2)]
    graph = onnx.load(BUNDLE / "understudy" / "target.onnx", load_external_data=False).graph
    products = sum(node.op_type == "MatMulIntegerToFloat" for node in graph.node)
    for step in steps[:2]:
        assert step["step_ms"] > 0 and step["operators"]["MatMulIntegerToFloat"]["nodes"] == products
        assert 0 < sum(each["nodes"] for each in step["operators"].values()) <= len(graph.node)
    assert "MatMulIntegerToFloat" in capsys.readouterr().out


def test_only_the_later_runs_count() -> None:
    runs = [{"name": "model_run", "ts": 100 * run, "dur": 50} for run in range(4)]
    nodes = [
        {
            "name": f"{number}_kernel_time",
            "ts": 100 * run + number,
            "dur": 10 ** (3 - run // 2),
            "args": {"op_name": name},
        }
        for run in range(4)
        for number, name in enumerate(("Add", "Mul", "Add"))
    ]
    assert operators.by_operator([*runs, *nodes]) == {
        "Add": {"nodes": 2, "ms": pytest.approx(0.2)}, "Mul": {"nodes": 1, "ms": pytest.approx(0.1)}
    }  # fmt: skip
