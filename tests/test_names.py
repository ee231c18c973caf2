"""A class name means one thing across the product, so that no import of one needs an `as`."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("outrider_core", "edge_runtime", "cloud", "export", "outrider")


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path.relative_to(ROOT).as_posix())
    assert len(places) > 300
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
