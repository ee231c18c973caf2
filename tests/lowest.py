"""`python -m tests.lowest EXTRA ...`: constraints for pip, the lowest releases that pyproject.toml allows."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(extras: Iterable[str]) -> dict[str, Version]:
    """By name, of what the package and these extras ask for by themselves."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    found: dict[str, Version] = {}
    for requirement in map(Requirement, asked):
        bounds = [Version(part.version) for part in requirement.specifier if part.operator in (">=", "==")]
        if requirement.marker is None or requirement.marker.evaluate():
            found[requirement.name] = max([*bounds, found.get(requirement.name, Version("0"))])
    found.pop(project["name"], None)
    return found


if __name__ == "__main__":
    for name, version in lowest(sys.argv[1:]).items():
        print(f"{name}=={version}")
