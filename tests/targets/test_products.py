"""Each machine takes a graph that it computes exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from outrider_core.targets import products
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.unsigned import with_unsigned_tables

Multiply = Callable[[bytes, NDArray[np.uint8]], NDArray[np.int64]]
SIGNED, UNSIGNED = products.products_graph(), products.products_graph(unsigned=True)


def saturating(a: NDArray[np.uint8]) -> NDArray[np.int64]:
    """What AVX2's vpmaddubsw makes of it: neighbours' products added in 16 bits."""
    b = products._table()
    pairs = a[:, 0::2, None].astype(np.int64) * b[None, 0::2] + a[:, 1::2, None].astype(np.int64) * b[None, 1::2]
    summed: NDArray[np.int64] = np.clip(pairs, -(2**15), 2**15 - 1).sum(1)
    return summed


def right(a: NDArray[np.uint8]) -> NDArray[np.int64]:
    return a.astype(np.int64) @ products._table().astype(np.int64)


def wrong_in_many_rows(a: NDArray[np.uint8]) -> NDArray[np.int64]:
    return right(a) + (len(a) > 32)


@pytest.fixture(autouse=True)
def _forget() -> None:
    products.exact.cache_clear()


def machine(monkeypatch: pytest.MonkeyPatch, signed: Callable[..., object], unsigned: Callable[..., object]) -> None:
    monkeypatch.setattr(products, "multiply", lambda graph, a: (signed if graph == SIGNED else unsigned)(a))


def choose() -> bool:
    return products.choose(lambda: SIGNED, lambda: UNSIGNED)


@pytest.mark.parametrize("inexact", [saturating, wrong_in_many_rows])
def test_inexact_products_of_signed_bytes_lead_to_unsigned_ones(
    monkeypatch: pytest.MonkeyPatch, inexact: Callable[..., object]
) -> None:
    machine(monkeypatch, right, right)
    assert choose()
    products.exact.cache_clear()
    machine(monkeypatch, inexact, right)
    assert not choose()


def test_a_machine_that_multiplies_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, saturating, saturating)
    with pytest.raises(UnsupportedTarget, match="does not multiply bytes exactly"):
        choose()


def test_unsigned_products_are_exact_here() -> None:
    assert products.exact(UNSIGNED)


@pytest.mark.parametrize("unsigned", [False, True])
def test_the_kernel_is_asked(unsigned: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 8, (5, 70), np.uint8), rng.integers(-8, 8, (70, 40), np.int8)
    product = products.multiply(products.products_graph(b, unsigned=unsigned), a)
    np.testing.assert_array_equal(product, a.astype(np.int64) @ b.astype(np.int64))


def test_both_graphs_compute_the_same_bits(tmp_path: Path) -> None:
    """With activations of seven bits, whose products fit 16 bits twice, no processor saturates."""
    rng = np.random.default_rng(3)
    table, scales = rng.integers(-128, 128, (64, 48), np.int8), rng.random(48, np.float32)
    node = onnx.helper.make_node(
        "MatMulIntegerToFloat", ["x", "table", "step", "scales", "zero"], ["y"], domain="com.microsoft"
    )
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ["rows", 64])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", 48])
    constants = {"table": table, "scales": scales, "step": np.float32(1 / 127), "zero": np.uint8(64)}
    tensors = [onnx.numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "one", [x], [y], tensors), opset_imports=opsets, ir_version=10
    )
    rows = rng.integers(0, 128, (9, 64), np.uint8)
    found = []
    for each in (model, with_unsigned_tables(model)):
        session = onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        found.append(session.run(None, {"x": rows})[0])
    assert np.array_equal(found[0], found[1])
    want = (rows.astype(np.int64) - 64) @ table.astype(np.int64)
    np.testing.assert_allclose(found[1], want * scales * np.float32(1 / 127), rtol=1e-5)


def test_a_bundle_names_the_graph_of_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "products.onnx").write_bytes(SIGNED)
    (tmp_path / "products.unsigned.onnx").write_bytes(UNSIGNED)
    bundle = TargetBundle(tmp_path, "t", "0" * 16, None, (), 1, ())  # type: ignore[arg-type]
    machine(monkeypatch, right, right)
    assert products.usable_graph(bundle) == tmp_path / "target.onnx"
    products.exact.cache_clear()
    machine(monkeypatch, saturating, right)
    assert products.usable_graph(bundle) == tmp_path / "target.unsigned.onnx"
