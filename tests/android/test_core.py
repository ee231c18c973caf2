"""android_demo/core: it compiles against Android's own API, and its tests pass on the desktop JVM."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from android_demo.ci import core
from tests.android.device import KOTLIN_TESTS
from tests.android.make_vectors import FOLDER, MAKERS
from tests.arrows import Import, circles

#: the longest file that still reads in one go
LINES = 400


def close(one: Any, other: Any) -> bool:
    """Equal, numbers up to what another machine's exp and log may differ by."""
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("name", MAKERS)
def test_vectors_are_up_to_date(name: str) -> None:
    recorded = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert close(recorded, json.loads(json.dumps(MAKERS[name]()))), "run: python -m tests.android.make_vectors"


def test_kotlin_tests_pass(
    classpath: list[Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    count = core.run_tests(classpath, tmp_path)
    record_property(KOTLIN_TESTS, count)
    assert count >= 70


def test_the_oldest_compiler_reads_it(tools: core.Toolchain) -> None:
    """A module's metadata begins with how many numbers its version has, and these."""
    metadata = (core.build(tools) / "META-INF" / "outrider-core.kotlin_module").read_bytes()
    level = core.versions()["kotlinStdlib"].split(".")
    assert struct.unpack(">3i", metadata[:12]) == (3, *map(int, level[:2]))


def test_every_file_is_short_and_none_knows_android_or_the_desktop() -> None:
    files = sorted((core.SOURCES / "main").rglob("*.kt"))
    assert len(files) > 10
    for file in files:
        source = file.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= LINES, file
        assert "import android" not in source, file


def test_no_packages_form_a_circle() -> None:
    root = core.SOURCES / "main" / "kotlin"
    packages, imports = set(), []
    for file in root.rglob("*.kt"):
        *package, name = file.relative_to(root).with_suffix("").parts
        packages.add(".".join(package))
        for found in re.finditer(r"^import (dev\.outrider\..+)$", file.read_text(encoding="utf-8"), re.M):
            imports.append(Import(".".join([*package, name]), found[1], 0))
    assert len(packages) >= 10
    assert circles(imports, dict.fromkeys(packages), {}) == set()


def test_no_line_is_too_long() -> None:
    for file in core.SOURCES.rglob("*.kt"):
        assert max(map(len, file.read_text(encoding="utf-8").splitlines())) <= 120, file
