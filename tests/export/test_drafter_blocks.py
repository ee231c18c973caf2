"""Weights in blocks of 4 and 8 bits, against plain loops and ONNX Runtime's own operator."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from export.bundle import blocks
from export.bundle.blocks import BLOCKS, dequantise, packed_bytes, places, quantise

Floats = NDArray[np.float32]

both_widths = pytest.mark.parametrize("bits", [4, 8])


def random_weight(rows: int, width: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return np.float32(scale) * np.random.default_rng(seed).standard_normal((rows, width), np.float32)


def read_blocks(packed: NDArray[np.uint8], scales: Floats, bits: int) -> np.ndarray:
    """Dequantised [N, blocks, block] in float64, by the layout's description and in plain loops."""
    rows, count, size = packed.shape
    values = np.empty((rows, count, size * 8 // bits))
    for place in np.ndindex(packed.shape):
        byte = int(packed[place])
        if bits == 8:
            values[place] = byte - 128
        else:
            values[(*place[:2], 2 * place[2])] = byte % 16 - 8
            values[(*place[:2], 2 * place[2] + 1)] = byte // 16 - 8
    return values * scales.astype(np.float64)[..., None]


def in_blocks(weight: Floats, block: int) -> np.ndarray:
    """weight [N, K] -> [N, blocks, block] float64, padded with zeros."""
    rows, width = weight.shape
    padded = np.zeros((rows, -(-width // block) * block))
    padded[:, :width] = weight
    return padded.reshape(rows, -1, block)


weights = st.builds(
    random_weight, st.integers(1, 5), st.integers(1, 150), st.integers(0, 999), st.sampled_from([1e-4, 0.05, 1.0, 30.0])
)


@both_widths
@given(weights)
def test_a_value_is_off_by_half_a_step_or_by_what_its_range_leaves_out(bits: int, weight: Floats) -> None:
    half, block = 2 ** (bits - 1), BLOCKS[bits]
    packed, scales = quantise(weight, bits)
    count = -(-weight.shape[1] // block)
    assert packed.dtype == np.uint8 and packed.shape == (len(weight), count, block * bits // 8)
    assert scales.dtype == np.float32 and scales.shape == (len(weight), count)
    exact, step = in_blocks(weight, block), scales.astype(np.float64)[..., None]
    error = np.abs(read_blocks(packed, scales, bits) - exact)
    cut = np.abs(exact - np.clip(exact / step, -half, half - 1) * step)
    assert (error <= (cut + 0.5 * np.abs(step)) * (1 + 1e-5)).all()


@both_widths
@given(weights)
def test_the_step_is_the_largest_weights_and_no_block_loses_by_a_smaller_range(bits: int, weight: Floats) -> None:
    half, block = 2 ** (bits - 1), BLOCKS[bits]
    packed, scales = quantise(weight, bits)
    exact = in_blocks(weight, block)
    largest = np.take_along_axis(exact, np.abs(exact).argmax(-1)[..., None], -1)
    full_step = -largest / half
    shares = scales.astype(np.float64)[..., None] / full_step
    assert shares.max() < 1 + 1e-5 and shares.min() > (0.7 if bits == 4 else 1) - 1e-5
    plain = np.clip(np.rint(exact / full_step), -half, half - 1) * full_step
    error = np.square(read_blocks(packed, scales, bits) - exact).sum(-1)
    assert (error <= np.square(plain - exact).sum(-1) * (1 + 1e-4)).all()
    if bits == 8:  # nothing is left out but up to one step opposite the largest weight
        worst = np.abs(read_blocks(packed, scales, bits) - exact) / np.abs(full_step)
        assert worst[exact / full_step < half - 0.5].max() <= 0.5 + 1e-4 and worst.max() <= 1 + 1e-4


def test_smaller_ranges_pay_at_four_bits() -> None:
    weight = random_weight(50, 64)
    exact = in_blocks(weight, 32)
    largest = np.take_along_axis(exact, np.abs(exact).argmax(-1)[..., None], -1)
    plain = np.clip(np.rint(exact / (-largest / 8)), -8, 7) * (-largest / 8)
    error = np.square(read_blocks(*quantise(weight, 4), 4) - exact).mean()
    assert error < 0.97 * np.square(plain - exact).mean()


@both_widths
@given(data=st.data())
def test_whole_multiples_of_the_step_come_back_exactly(bits: int, data: st.DataObject) -> None:
    half, block = 2 ** (bits - 1), BLOCKS[bits]
    step = np.float32(data.draw(st.sampled_from([2.0**-10, 0.25, 1.0, -4.0])))
    rows = st.lists(st.integers(-half, half - 1), min_size=2 * block, max_size=2 * block)
    steps = np.array(data.draw(st.lists(rows, min_size=1, max_size=2)), np.float32)
    steps[:, ::block] = -half  # the largest weight of each block
    packed, scales = quantise(steps * step, bits)
    assert np.array_equal(dequantise(packed, scales, 2 * block), steps * step)
    assert (scales == step).all()


def test_of_two_nibbles_the_even_index_is_the_low_one() -> None:
    steps = np.array([[-8, -7, 0, 1, 7, -1, 2, -2, *[0] * 24]], np.float32)
    packed, _ = quantise(steps * np.float32(0.5), 4)
    assert packed[0, 0, :5].tolist() == [0x10, 0x98, 0x7F, 0x6A, 0x88]


def test_eight_bit_values_stand_in_order_with_an_offset_of_128() -> None:
    steps = np.array([[-128, -127, 0, 1, 127, *[0] * 59]], np.float32)
    assert quantise(steps * np.float32(0.5), 8)[0][0, 0, :6].tolist() == [0, 1, 128, 129, 255, 128]


@both_widths
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 999))
def test_dequantise_reads_any_bytes(bits: int, rows: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, count, BLOCKS[bits] * bits // 8), np.uint8)
    scales = rng.standard_normal((rows, count), np.float32)
    inputs = count * BLOCKS[bits] - seed % 7
    got = dequantise(packed, scales, inputs)
    assert got.dtype == np.float32 and got.shape == (rows, inputs)
    np.testing.assert_allclose(got, read_blocks(packed, scales, bits).reshape(rows, -1)[:, :inputs], rtol=1e-6)


@both_widths
@given(weights)
def test_zeros_stay_zeros(bits: int, weight: Floats) -> None:
    weight[:, ::3] = 0.0
    packed, scales = quantise(weight, bits)
    got = dequantise(packed, scales, packed.shape[1] * BLOCKS[bits])
    assert not got[:, : weight.shape[1] : 3].any()
    assert not got[:, weight.shape[1] :].any()  # what the last block was padded with


@both_widths
def test_blocks_of_zeros_have_a_scale_to_divide_by(bits: int) -> None:
    block = BLOCKS[bits]
    weight = np.zeros((2, 3 * block), np.float32)
    weight[1, block : 2 * block] = random_weight(1, block)
    packed, scales = quantise(weight, bits)
    assert np.isfinite(scales).all() and (scales != 0).all()
    got = dequantise(packed, scales, 3 * block)
    assert not got[0].any() and not got[1, :block].any() and not got[1, 2 * block :].any()
    assert got[1, block : 2 * block].any()


@both_widths
@given(weights)
def test_every_row_is_quantised_by_itself(bits: int, weight: Floats) -> None:
    packed, scales = quantise(weight, bits)
    for row in range(len(weight)):
        alone = quantise(weight[row : row + 1], bits)
        assert np.array_equal(alone[0][0], packed[row]) and np.array_equal(alone[1][0], scales[row])


@both_widths
@pytest.mark.parametrize("rows", [3, 4, 10, 12])
def test_large_tables_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch, bits: int, rows: int) -> None:
    weight = random_weight(rows, 70)
    whole = quantise(weight, bits)
    sizes: list[int] = []
    one = blocks._quantise
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(blocks, "_quantise", lambda x, *rest: (sizes.append(len(x)), one(x, *rest))[1])
    parts = quantise(weight, bits)
    assert np.array_equal(parts[0], whole[0]) and np.array_equal(parts[1], whole[1])
    assert max(sizes) == 3 and sum(sizes) == rows


@both_widths
def test_half_precision_weights_are_quantised_in_float32(bits: int) -> None:
    weight = random_weight(3, 70).astype(np.float16)
    got, expected = quantise(weight, bits), quantise(weight.astype(np.float32), bits)
    assert np.array_equal(got[0], expected[0]) and np.array_equal(got[1], expected[1])


@both_widths
@pytest.mark.parametrize("width", [128, 100, 33])
def test_onnx_runtime_reads_the_same_layout(bits: int, width: int) -> None:
    packed, scales = quantise(random_weight(7, width), bits)
    node = helper.make_node(
        "MatMulNBits", ["x", "packed", "scales"], ["y"], domain="com.microsoft", K=width, N=7, bits=bits,
        block_size=BLOCKS[bits], accuracy_level=1,
    )  # fmt: skip
    x_info, y_info = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
        for name, size in (("x", width), ("y", 7))
    )
    stored = [numpy_helper.from_array(packed, "packed"), numpy_helper.from_array(scales, "scales")]
    graph = helper.make_graph([node], "product", [x_info], [y_info], stored)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = random_weight(5, width, seed=1)
    np.testing.assert_allclose(session.run(["y"], {"x": x})[0], x @ dequantise(packed, scales, width).T, atol=1e-4)


@both_widths
def test_packed_bytes_are_those_of_a_table(bits: int) -> None:
    assert packed_bytes(6 * 128, bits) == sum(part.nbytes for part in quantise(random_weight(6, 128), bits))
    assert packed_bytes(6 * 128, 16) == 2 * 6 * 128


def test_drafted_tokens_stand_first_and_every_token_somewhere() -> None:
    ids = np.array([7, 0, 3])
    place, others = places(ids, 9)
    assert place[ids].tolist() == [0, 1, 2] and others.tolist() == [1, 2, 4, 5, 6, 8]
    assert place[others].tolist() == [3, 4, 5, 6, 7, 8]
