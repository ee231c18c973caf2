"""The imports between rooms of the house, read from the source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """`module` of our own imports `name` at `line`."""

    module: str
    name: str
    line: int


def imports_below(root: Path, packages: tuple[str, ...]) -> Iterator[Import]:
    """Every import statement in the packages under `root`, those inside functions and type-checking blocks included."""
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), path)):
                for name in _imported(node, module, is_package):
                    yield Import(module, name, node.lineno)  # type: ignore[attr-defined]


def _imported(node: ast.AST, module: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parents = module.split(".") if is_package else module.split(".")[:-1]
        base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in node.names]  # `from outrider_core import protocol` names a room too


def room_of(name: str, rooms: Mapping[str, object]) -> str | None:
    """The innermost room that a module's name lies in, or None: not one of ours."""
    parts = name.split(".")
    return next((room for end in range(len(parts), 0, -1) if (room := ".".join(parts[:end])) in rooms), None)


def broken_arrows(
    imports: list[Import], allowed: Mapping[str, frozenset[str]], exceptions: Mapping[tuple[str, str], str]
) -> list[str]:
    """A line for each import that leads to a room its own room may not use. exceptions: (module, room) -> reason."""
    broken = []
    for found in imports:
        own, other = room_of(found.module, allowed), room_of(found.name, allowed)
        if own is None or other is None or other == own or other in allowed[own]:
            continue
        if (found.module, other) not in exceptions:
            broken.append(f"{found.module}:{found.line} imports {found.name}: {own} must not use {other}")
    return broken


def circles(imports: list[Import], rooms: Mapping[str, object], exceptions: Mapping[tuple[str, str], str]) -> set[str]:
    """Rooms that can be reached from themselves over the imports that are there."""
    edges: dict[str, set[str]] = {room: set() for room in rooms}
    for found in imports:
        own, other = room_of(found.module, rooms), room_of(found.name, rooms)
        if own and other and own != other and (found.module, other) not in exceptions:
            edges[own].add(other)
    reached = edges
    for _ in edges:
        reached = {room: others.union(*(reached[other] for other in others)) for room, others in reached.items()}
    return {room for room, others in reached.items() if room in others}


def inner_rooms(imports: list[Import], package: str) -> dict[str, set[str]]:
    """The rooms of `package`, which are the modules and folders right below it, and which of them each one imports."""
    depth = package.count(".") + 1
    inside = [found for found in imports if found.module.startswith(f"{package}.")]
    arrows: dict[str, set[str]] = {found.module.split(".")[depth]: set() for found in inside}
    for found in inside:
        own, parts = found.module.split(".")[depth], found.name.split(".")
        if found.name.startswith(f"{package}.") and parts[depth] in arrows and parts[depth] != own:
            arrows[own].add(parts[depth])
    return arrows


def floors(arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """Each room's floor: above all that it imports; 1 is the ground. Raises ValueError that names a circle's rooms."""
    levels: dict[str, int] = {}
    while len(levels) < len(arrows):
        ready = [room for room in arrows if room not in levels and arrows[room] <= levels.keys()]
        if not ready:
            raise ValueError(f"these rooms import each other: {sorted(arrows.keys() - levels.keys())}")
        levels |= {room: 1 + max((levels[other] for other in arrows[room]), default=0) for room in ready}
    return levels
