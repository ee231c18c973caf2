"""docs/api.md names the exports of `outrider`, and describes them correctly."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import outrider

REFERENCE = (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")


def test_the_public_names_are_those_that_can_be_imported() -> None:
    assert sorted({*outrider._HOMES, "__version__"}) == sorted(outrider.__all__)


@pytest.mark.parametrize("name", outrider.__all__)
def test_every_public_name_stands_in_the_reference(name: str) -> None:
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", REFERENCE), f"docs/api.md does not mention {name}"


def test_every_public_method_and_argument_of_the_runtime_stands_in_the_reference() -> None:
    from outrider import BlockingRuntime, EdgeRuntime

    for kind in (EdgeRuntime, BlockingRuntime):
        methods = [name for name, _ in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")]
        missing = [name for name in methods if not re.search(rf"`[^`]*\b{name}\b", REFERENCE)]
        assert not missing, f"docs/api.md does not mention {kind.__name__}.{missing}"
    arguments = [name for name in inspect.signature(EdgeRuntime).parameters if f"`{name}`" not in REFERENCE]
    assert not arguments, f"docs/api.md does not mention the arguments {arguments}"
    shown = re.search(r"`generate\((.*?)\)`", REFERENCE)
    parameters = list(inspect.signature(EdgeRuntime.generate).parameters.values())[1:]
    defaults = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert shown and shown[1] == ", ".join([defaults[0], "*", *defaults[1:]])


def test_the_fields_of_events_stand_in_the_reference() -> None:
    from outrider import Adopted, Finished, HandedOver, LinkState, Policy, Provisional, RolledBack, TreeShape, Verified

    for kind in (Adopted, Finished, HandedOver, LinkState, Provisional, RolledBack, Verified):
        own = [field.name for field in fields(kind) if field.name not in ("verified", "provisional")]
        (row,) = (line for line in REFERENCE.splitlines() if line.startswith(f"| `{kind.__name__}` |"))
        assert row.split("|")[2].strip() == ", ".join(f"`{name}`" for name in own)
    for options in (Policy, TreeShape):
        assert f"`{options.__name__}({', '.join(field.name for field in fields(options))})`" in REFERENCE
