"""Tables in blocks: what they store is near the weights, and is the weights where those come from such a file."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider_core.targets.blocks import BLOCK, ZERO, Bytes, Halves, quantise4_blocks, quantise8_blocks
from outrider_core.targets.products import open_session, rows_graph
from outrider_core.targets.weights import Floats


def steps(scales: Halves, factor: Floats) -> Floats:
    found: Floats = (scales.astype(np.float32) * factor)[..., None]
    return found


def read4(packed: Bytes, zeros: Bytes, scales: Halves, factor: Floats) -> Floats:
    levels = np.concatenate([packed & 15, packed >> 4], -1).astype(np.float32)
    values: Floats = (8 * levels - zeros[..., None]) * steps(scales, factor)
    return values.reshape(len(packed), -1)


@given(st.integers(0, 99), st.sampled_from([32, 48, 96]), st.sampled_from([1e-7, 1.0, 1e4]))
def test_four_bits_are_near_the_weights(seed: int, width: int, size: float) -> None:
    """Of any size, and where the last block is cut short."""
    weight = np.random.default_rng(seed).standard_normal((7, width), np.float32) * np.float32(size)
    found = read4(*quantise4_blocks(weight))[:, :width]
    blocks = np.pad(weight, ((0, 0), (0, -width % BLOCK))).reshape(7, -1, BLOCK)
    span = blocks.max(-1) - blocks.min(-1)
    step = np.repeat(span / 15, BLOCK, 1)[:, :width]
    assert (np.abs(found - weight) < 2.2 * step).all()  # those beyond a range that was shortened by a fifth
    assert np.square(found - weight).mean() < 0.11 * np.square(step).mean()


@given(st.integers(0, 99))
def test_weights_of_a_four_bit_file_stay(seed: int) -> None:
    """d * q + m with q in 0..15, both ends in use: up to an eighth of a step between two offsets."""
    rng = np.random.default_rng(seed)
    d = rng.uniform(0.001, 0.01, (5, 3, 1)).astype(np.float16).astype(np.float32)
    m = (-d * rng.uniform(1, 14, d.shape)).astype(np.float16).astype(np.float32)
    q = rng.integers(0, 16, (5, 3, BLOCK))
    q[..., 3], q[..., 20] = 0, 15
    weight = (d * q + m).astype(np.float32)
    found = read4(*quantise4_blocks(weight.reshape(5, -1)))
    assert (np.abs(found.reshape(weight.shape) - weight) < d * 0.08).all()


@given(st.integers(0, 99))
def test_eight_bits(seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((9, 70), np.float32)
    values, scales, factor = quantise8_blocks(weight)
    found = ((values.astype(np.float32) - ZERO) * steps(scales, factor)).reshape(9, -1)[:, :70]
    assert np.abs(found - weight).max() < np.abs(weight).max() / 250


def test_calibration_lowers_the_error_of_outputs() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4000, 96)) @ (rng.standard_normal((96, 96)) * np.exp(-np.arange(96) / 8)[:, None])
    weight = rng.standard_normal((50, 96), np.float32)

    def change(moments: np.ndarray | None) -> float:
        return float(np.square(x @ (read4(*quantise4_blocks(weight, moments)) - weight).T).mean())

    assert change(x.T @ x) < 0.7 * change(None)


def test_nothing_but_zeros() -> None:
    zeros = np.zeros((3, 40), np.float32)
    assert (read4(*quantise4_blocks(zeros)) == 0).all() and (quantise8_blocks(zeros)[0] == ZERO).all()


def test_the_graph_unpacks_what_was_packed() -> None:
    """Rows of the unit matrix give the weights back, up to the rounding of inputs, of which a one has none."""
    weight = np.random.default_rng(0).standard_normal((160, 288), np.float32)  # products.rows_graph's own
    session = open_session(rows_graph(4))
    product = session.run(None, {"activations": np.eye(288, dtype=np.float32)})[0]
    np.testing.assert_allclose(product.T, read4(*quantise4_blocks(weight))[:, :288], rtol=1e-2, atol=1e-3)
