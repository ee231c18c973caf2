"""No model folder may bring code of its own: every `trust_remote_code` in the project is False."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("outrider", "outrider_core", "export", "edge_runtime", "cloud", "lab", "benchmarks", "optimum", "tests")


def remote_code(source: str) -> list[int]:
    """Lines of calls or assignments that let remote code in, or might."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        name = node.arg if isinstance(node, ast.keyword) else None
        value = node.value if isinstance(node, ast.keyword) else None
        if isinstance(node, ast.Dict):
            for key, item in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                    name, value = "trust_remote_code", item
        if name == "trust_remote_code" and not (isinstance(value, ast.Constant) and value.value is False):
            lines.append(value.lineno if value is not None else 0)
    return lines


def test_the_search_finds_it() -> None:
    assert remote_code("load(x, trust_remote_code=True)\nload(y, trust_remote_code=flag)") == [1, 2]
    assert remote_code("options = {'trust_remote_code': True}") == [1]
    assert remote_code("load(x, trust_remote_code=False)") == []


def test_no_remote_code() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 80
    found = {str(path): lines for path in files if (lines := remote_code(path.read_text("utf-8")))}
    assert found == {}
