"""Parameters of tests by tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Return `values` for `parametrize`: `make test` runs the first `count`, `make test-slow` the rest.

    A tuple gives one value to each of several parameters.
    """
    each = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=() if at < count else pytest.mark.slow) for at, value in enumerate(each)]
