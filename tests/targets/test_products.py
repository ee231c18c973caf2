"""The check for saturating kernels sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider_core.targets import products
from outrider_core.targets.config import UnsupportedTarget
from tests.targets.plain import skip_unless_exact


def saturating(_session: Any, a: NDArray[np.uint8]) -> NDArray[np.int64]:
    """What AVX2's vpmaddubsw makes of it: neighbours' products added in 16 bits."""
    b = products._table()
    pairs = a[:, 0::2, None].astype(np.int64) * b[None, 0::2] + a[:, 1::2, None].astype(np.int64) * b[None, 1::2]
    summed: NDArray[np.int64] = np.clip(pairs, -(2**15), 2**15 - 1).sum(1)
    return summed


def wrong_in_many_rows(_session: Any, a: NDArray[np.uint8]) -> NDArray[np.int64]:
    product: NDArray[np.int64] = a.astype(np.int64) @ products._table().astype(np.int64) + (len(a) > 32)
    return product


@pytest.mark.parametrize("inexact", [saturating, wrong_in_many_rows])
def test_inexact_kernels_are_refused(monkeypatch: pytest.MonkeyPatch, inexact: Any) -> None:
    graph = products.products_graph()
    products.check_products(graph)  # the machine that runs the tests does it right
    monkeypatch.setattr(products, "_run", inexact)
    with pytest.raises(UnsupportedTarget, match="not exact on this processor"):
        products.check_products(graph)


def test_the_kernel_is_asked() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 8, (5, 70), np.uint8), rng.integers(-8, 8, (70, 40), np.int8)
    product = products._run(products.open_session(products.products_graph(b)), a)
    np.testing.assert_array_equal(product, a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize("bits", [4, 32])
def test_rows_that_depend_on_others_are_refused(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    skip_unless_exact(bits)
    graph = products.rows_graph(bits)
    products.check_products(graph)  # on the machine that runs the tests they do not
    run = products._run

    def otherwise(session: Any, rows: NDArray[Any]) -> NDArray[Any]:
        found = run(session, rows)
        return found if len(rows) != 17 else np.nextafter(found, 0)

    monkeypatch.setattr(products, "_run", otherwise)
    with pytest.raises(UnsupportedTarget, match="use a target bundle of 8 bits"):
        products.check_products(graph)
