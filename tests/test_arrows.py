"""Rooms of the house import downward only: the layout of docs/design.md, held against the code's own imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.arrows import Import, broken_arrows, circles, floors, imports_below, inner_rooms
from tests.drawings import DOCUMENTS, DRAWINGS, drawn

ROOT = Path(__file__).parents[1]
PROTOCOL = "outrider_core.protocol"
FIRST = frozenset({"outrider_core", PROTOCOL})
SHARED = FIRST | {"outrider_core.drafting", "outrider_core.models", "outrider_core.targets", "outrider_core.chat"}
ENDS = SHARED | {"edge_runtime", "cloud"}
PRODUCT = ENDS | {"export", "outrider"}
#: room -> what it may import besides itself, from the bottom up
ROOMS: dict[str, frozenset[str]] = {
    "outrider_core": frozenset(),  # its own modules: what a machine is, types of arguments
    PROTOCOL: frozenset(),
    "outrider_core.chat": FIRST,
    "outrider_core.drafting": FIRST | {"outrider_core.chat"},
    "outrider_core.targets": FIRST | {"outrider_core.chat"},
    "outrider_core.models": FIRST | {"outrider_core.targets"},
    "edge_runtime": SHARED,
    "cloud": SHARED,
    "export": ENDS,
    "outrider": ENDS | {"export"},
    "optimum": ENDS | {"export"},
    "android_demo": SHARED,
    "benchmarks": PRODUCT | {"android_demo"},
    "lab": PRODUCT | {"benchmarks"},
}
#: (module, room) -> why it may import upward
EXCEPTIONS = {
    ("edge_runtime.__main__", "outrider"): "a shim: `python -m edge_runtime` is the command line, which lies above",
}
#: what the protocol may import: nothing here does I/O, reads a clock or draws at random
PURE = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools",
    "math", "msgspec", "numpy", "operator", "re", "string", "struct", "types", "typing", "zlib",
}  # fmt: skip
PACKAGES = tuple(dict.fromkeys(room.partition(".")[0] for room in ROOMS))


def impure(imports: list[Import]) -> list[str]:
    """Imports of the protocol beyond PURE and itself."""
    own = [found for found in imports if found.module.startswith(PROTOCOL)]
    return [
        f"{found.module}:{found.line} imports {found.name}"
        for found in own
        if found.name.startswith("numpy.random")
        or (not found.name.startswith(f"{PROTOCOL}.") and found.name.partition(".")[0] not in PURE)
    ]


@pytest.fixture(scope="module")
def ours() -> list[Import]:
    found = list(imports_below(ROOT, PACKAGES))
    assert {imported.module.partition(".")[0] for imported in found} == set(PACKAGES), "a room was not read"
    return found


def test_no_room_imports_one_above(ours: list[Import]) -> None:
    assert broken_arrows(ours, ROOMS, EXCEPTIONS) == []


def test_no_rooms_form_a_circle(ours: list[Import]) -> None:
    assert circles(ours, ROOMS, EXCEPTIONS) == set()


def test_the_protocol_is_pure(ours: list[Import]) -> None:
    assert impure(ours) == []
    for path in (ROOT / "outrider_core" / "protocol").glob("*.py"):
        assert "np.random" not in path.read_text(encoding="utf-8")


def test_every_exception_is_needed(ours: list[Import]) -> None:
    assert len(broken_arrows(ours, ROOMS, {})) == len(EXCEPTIONS)


def test_the_layout_itself_leads_downward_only() -> None:
    below: set[str] = set()
    for room, allowed in ROOMS.items():
        assert allowed <= below, f"{room} may import what is not below it"
        below.add(room)


#: package -> its rooms and floors at most; none of them form a circle, imports for types alone included
INNER_ROOMS = {"edge_runtime": (12, 6), "export": (8, 5), "cloud": (16, 8)}


@pytest.mark.parametrize("package", INNER_ROOMS)
def test_the_rooms_inside_form_no_circle(ours: list[Import], package: str) -> None:
    levels = floors(inner_rooms(ours, package))
    rooms, highest = INNER_ROOMS[package]
    assert len(levels) <= rooms and max(levels.values()) <= highest


@pytest.mark.parametrize("name", DRAWINGS)
def test_documents_show_the_code(name: str) -> None:
    assert drawn(name) == (DOCUMENTS / name).read_text(encoding="utf-8"), "run: python -m tests.drawings"


BROKEN = {
    "edge_runtime/link.py": ("import cloud.server\n", "edge_runtime.link:1 imports cloud.server"),
    "cloud/local.py": (
        "def f():\n    from edge_runtime.link import Link\n",
        "cloud.local:2 imports edge_runtime",
    ),
    "outrider_core/models/moa.py": ("from outrider_core import drafting\n", "must not use outrider_core.drafting"),
    "outrider_core/drafting/__init__.py": ("from ..models import moa\n", "must not use outrider_core.models"),
    "outrider_core/machine.py": ("from .protocol import wire\n", "outrider_core must not use outrider_core.protocol"),
    "export/train/train.py": ("import lab\n", "export must not use lab"),
    "benchmarks/demo.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lab.baselines\n",
        "benchmarks must not use lab",
    ),
}


@pytest.mark.parametrize("path", BROKEN)
def test_a_broken_arrow_is_found(path: str, tmp_path: Path) -> None:
    """In a small tree of the same rooms whose only other import is an allowed one."""
    text, message = BROKEN[path]
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "train.py").write_text("import torch\nfrom export.train import train\n")
    assert broken_arrows(list(imports_below(tmp_path, PACKAGES)), ROOMS, {}) == []
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    [line] = broken_arrows(list(imports_below(tmp_path, PACKAGES)), ROOMS, {})
    assert message in line


def test_a_circle_is_found(tmp_path: Path) -> None:
    for room, other in (("cloud", "export"), ("export", "lab"), ("lab", "cloud"), ("outrider", "lab")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "module.py").write_text(f"from {other}.module import name\n")
    assert circles(list(imports_below(tmp_path, PACKAGES)), ROOMS, {}) == {"cloud", "export", "lab"}


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "import os.path",
        "from pathlib import Path",
        "import random",
        "import secrets",
        "import socket",
        "from numpy.random import default_rng",
        "from numpy import random",
        "import torch",
        "import outrider_core.machine",
    ],
)
def test_an_impure_protocol_is_found(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "outrider_core" / "protocol"
    folder.mkdir(parents=True)
    (folder / "wire.py").write_text(
        "from typing import Any\nimport msgspec\nimport numpy as np\n"
        "from outrider_core.protocol.tree import ROOT\nfrom . import rows\n"
    )
    assert impure(list(imports_below(tmp_path, PACKAGES))) == []
    (folder / "noise.py").write_text(text + "\n")
    assert len(impure(list(imports_below(tmp_path, PACKAGES)))) == 1


def test_an_inner_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "cloud" / "engine").mkdir(parents=True)
    (tmp_path / "cloud" / "engine" / "step.py").write_text("import cloud.engine.runner\nfrom cloud.app import App\n")
    (tmp_path / "cloud" / "app.py").write_text("from cloud.settings import Settings\n")
    (tmp_path / "cloud" / "settings.py").write_text("import os\n")
    arrows = inner_rooms(list(imports_below(tmp_path, ("cloud",))), "cloud")
    assert floors(arrows) == {"engine": 3, "app": 2, "settings": 1}
    (tmp_path / "cloud" / "settings.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cloud.engine.step import Step\n"
    )
    with pytest.raises(ValueError, match=r"app.*engine.*settings"):
        floors(inner_rooms(list(imports_below(tmp_path, ("cloud",))), "cloud"))
