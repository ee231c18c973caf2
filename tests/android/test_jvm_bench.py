"""benchmarks.jvm: the two runtimes draft the same trees with a real engine, and every figure is there."""

from __future__ import annotations

import argparse

import pytest

from android_demo.ci import native
from android_demo.ci.pins import REPOSITORY
from benchmarks import jvm

DEFAULT = REPOSITORY / "build" / "bundle"

pytestmark = [
    pytest.mark.skipif(not (DEFAULT / "manifest.json").is_file(), reason="no build/bundle; run: make test-android"),
    pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable())),
]


def test_the_same_trees_are_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm, "WARM_UP", 0)
    options = argparse.Namespace(bundle=DEFAULT, engine="onnx", threads=1, repeats=1)
    figures = jvm.measure(options)  # raises where a tree differs
    rows = {row["what"]: row for row in figures["rows"]}
    assert len(rows) == len(jvm.WIDTHS) + len(jvm.SAMPLINGS) * len(jvm.NODES)
    assert all(row["jvm_ms"] > 0 and row["python_ms"] > 0 for row in rows.values())
    assert rows["tree of 62, greedy"]["steps_per_tree"] >= rows["tree of 8, greedy"]["steps_per_tree"] > 1
    jvm.show(figures)


def test_memory_grows_from_the_empty_jvm_to_the_loaded_engine() -> None:
    figures = jvm.memory(argparse.Namespace(bundle=DEFAULT, engine="onnx", threads=1))
    assert figures["empty_mb"] < figures["bundle_mb"] < figures["loaded_mb"] <= figures["peak_mb"] < 600
