"""Parameters of tests by tier."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def quick(chosen: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return `values` for `parametrize`: `make test` runs the `chosen` ones, `make test-slow` the rest.

    A tuple gives one value to each of several parameters.
    """

    def tier(value: Any) -> Any:
        several = value if isinstance(value, tuple) else (value,)
        return pytest.param(*several, marks=() if value in chosen else pytest.mark.slow)

    return [tier(value) for value in values]


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Return `values` as `quick` does, with the first `count` of them chosen."""
    values = list(values)
    return quick(values[:count], values)
