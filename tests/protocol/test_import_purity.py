"""The device never loads what belongs to the cloud: checked in fresh interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import outrider_core.protocol
from tests.waiting import HANG

PROGRAM = """
import importlib, json, pkgutil, sys
names = [sys.argv[1]]
for found in pkgutil.walk_packages(importlib.import_module(sys.argv[1]).__path__, sys.argv[1] + "."):
    names.append(found.name)
    importlib.import_module(found.name)
print(json.dumps([names, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
CLOUD_ONLY = {"torch", "transformers", "onnx", "safetensors", "cloud", "export"}


@pytest.mark.parametrize(
    ("package", "least", "banned"),
    [
        (
            "outrider_core.protocol",
            6,
            CLOUD_ONLY | {"onnxruntime", "websockets", "tokenizers", "jinja2", "edge_runtime"},
        ),
        ("edge_runtime", 8, CLOUD_ONLY),
    ],
)
def test_package_does_not_load(package: str, least: int, banned: set[str]) -> None:
    root = Path(outrider_core.protocol.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, package], cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    imported, loaded = json.loads(result.stdout)
    assert len(imported) >= least
    assert banned & set(loaded) == set()
