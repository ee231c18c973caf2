"""Weights in blocks, against plain numpy and ONNX Runtime's own operator, and the device half rebuilt on them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from torch import Tensor, nn

from export.bundle import quant
from export.bundle.quant import (
    BLOCKS,
    BlockTable,
    DivNorm,
    Embedding,
    Linear,
    Profile,
    SharedEmbedding,
    Table,
    dequantise,
    is_tied,
    matmul_nbits,
    packed_bytes,
    quantise,
    rebuild,
    table,
    without_tables,
)
from export.bundle.steps import example_inputs
from outrider_core.models.moa import DeviceHalf
from outrider_core.models.moa_config import MoAConfig

both_widths = pytest.mark.parametrize("bits", [4, 8])


def random_weight(rows: int, width: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def read_blocks(packed: Tensor, scales: Tensor, bits: int) -> np.ndarray:
    """Dequantised [N, blocks, block] in float64, by the layout's description and in plain loops."""
    rows, blocks, size = packed.shape
    values = np.empty((rows, blocks, size * 8 // bits))
    for place in np.ndindex(packed.shape):
        byte = int(packed[place])
        if bits == 8:
            values[place] = byte - 128
        else:
            values[(*place[:2], 2 * place[2])] = byte % 16 - 8
            values[(*place[:2], 2 * place[2] + 1)] = byte // 16 - 8
    return values * scales.double().numpy()[..., None]


def in_blocks(weight: Tensor, block: int) -> np.ndarray:
    """weight [N, K] -> [N, blocks, block] float64, padded with zeros."""
    rows, width = weight.shape
    padded = np.zeros((rows, -(-width // block) * block))
    padded[:, :width] = weight.numpy()
    return padded.reshape(rows, -1, block)


# blocks

weights = st.builds(
    random_weight, st.integers(1, 5), st.integers(1, 150), st.integers(0, 999), st.sampled_from([1e-4, 0.05, 1.0, 30.0])
)
layouts = st.sampled_from([(4, 32), (4, 16), (4, 128), (8, 64), (8, 32)])


@given(weights, layouts)
def test_a_value_is_off_by_half_a_step_or_by_what_its_range_leaves_out(weight: Tensor, layout: tuple[int, int]) -> None:
    bits, block = layout
    half = 2 ** (bits - 1)
    packed, scales = quantise(weight, bits, block)
    blocks = -(-weight.shape[1] // block)
    assert packed.dtype == torch.uint8 and packed.shape == (len(weight), blocks, block * bits // 8)
    assert scales.dtype == torch.float32 and scales.shape == (len(weight), blocks)
    exact, step = in_blocks(weight, block), scales.double().numpy()[..., None]
    error = np.abs(read_blocks(packed, scales, bits) - exact)
    cut = np.abs(exact - np.clip(exact / step, -half, half - 1) * step)
    assert (error <= (cut + 0.5 * np.abs(step)) * (1 + 1e-5)).all()


@given(weights, layouts)
def test_the_step_is_the_largest_weights_and_no_block_loses_by_a_smaller_range(
    weight: Tensor, layout: tuple[int, int]
) -> None:
    bits, block = layout
    half = 2 ** (bits - 1)
    packed, scales = quantise(weight, bits, block)
    exact = in_blocks(weight, block)
    largest = np.take_along_axis(exact, np.abs(exact).argmax(-1)[..., None], -1)
    full_step = -largest / half
    shares = scales.double().numpy()[..., None] / full_step
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
    error = np.square(read_blocks(*quantise(weight, 4, 32), 4) - exact).mean()
    assert error < 0.97 * np.square(plain - exact).mean()


@both_widths
@given(data=st.data())
def test_whole_multiples_of_the_step_come_back_exactly(bits: int, data: st.DataObject) -> None:
    half, block = 2 ** (bits - 1), BLOCKS[bits]
    step = data.draw(st.sampled_from([2.0**-10, 0.25, 1.0, -4.0]))
    rows = st.lists(st.integers(-half, half - 1), min_size=2 * block, max_size=2 * block)
    steps = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=2)))
    steps[:, ::block] = -half  # the largest weight of each block
    packed, scales = quantise(steps * step, bits, block)
    assert torch.equal(dequantise(packed, scales, bits), steps * step)
    assert torch.equal(scales, torch.full_like(scales, step))


def test_of_two_nibbles_the_even_index_is_the_low_one() -> None:
    steps = torch.tensor([[-8, -7, 0, 1, 7, -1, 2, -2, *[0] * 24]])
    packed, _ = quantise(steps * 0.5, 4, 32)
    assert packed[0, 0, :5].tolist() == [0x10, 0x98, 0x7F, 0x6A, 0x88]


def test_eight_bit_values_stand_in_order_with_an_offset_of_128() -> None:
    steps = torch.tensor([[-128, -127, 0, 1, 127, *[0] * 59]])
    assert quantise(steps * 0.5, 8, 64)[0][0, 0, :6].tolist() == [0, 1, 128, 129, 255, 128]


@both_widths
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 999))
def test_dequantise_reads_any_bytes(bits: int, rows: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, blocks, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randn(rows, blocks, generator=generator)
    got = dequantise(packed, scales, bits)
    assert got.dtype == torch.float32 and got.shape == (rows, blocks * 16 * 8 // bits)
    np.testing.assert_allclose(got, read_blocks(packed, scales, bits).reshape(rows, -1), rtol=1e-6)


@both_widths
@given(weights)
def test_zeros_stay_zeros(bits: int, weight: Tensor) -> None:
    weight[:, ::3] = 0.0
    packed, scales = quantise(weight, bits, BLOCKS[bits])
    got = dequantise(packed, scales, bits)
    assert not got[:, : weight.shape[1] : 3].any()
    assert not got[:, weight.shape[1] :].any()  # what the last block was padded with


@both_widths
def test_blocks_of_zeros_have_a_scale_to_divide_by(bits: int) -> None:
    block = BLOCKS[bits]
    weight = torch.zeros(2, 3 * block)
    weight[1, block : 2 * block] = random_weight(1, block)
    packed, scales = quantise(weight, bits, block)
    assert scales.isfinite().all() and (scales != 0).all()
    got = dequantise(packed, scales, bits)
    assert not got[0].any() and not got[1, :block].any() and not got[1, 2 * block :].any()
    assert got[1, block : 2 * block].any()


@both_widths
@given(weights)
def test_every_row_is_quantised_by_itself(bits: int, weight: Tensor) -> None:
    packed, scales = quantise(weight, bits, BLOCKS[bits])
    for row in range(len(weight)):
        alone = quantise(weight[row : row + 1], bits, BLOCKS[bits])
        assert torch.equal(alone[0][0], packed[row]) and torch.equal(alone[1][0], scales[row])


@both_widths
@pytest.mark.parametrize("rows", [3, 4, 10, 12])
def test_large_tables_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch, bits: int, rows: int) -> None:
    weight = random_weight(rows, 70)
    whole = quantise(weight, bits, BLOCKS[bits])
    monkeypatch.setattr(quant, "ROWS_AT_ONCE", 3)
    sizes: list[int] = []
    pad = nn.functional.pad
    monkeypatch.setattr(nn.functional, "pad", lambda x, *rest: (sizes.append(len(x)), pad(x, *rest))[1])
    parts = quantise(weight, bits, BLOCKS[bits])
    assert torch.equal(parts[0], whole[0]) and torch.equal(parts[1], whole[1])
    assert max(sizes) == 3 and sum(sizes) == rows


@both_widths
def test_half_precision_weights_are_quantised_in_float32(bits: int) -> None:
    weight = random_weight(3, 70).half()
    got, expected = quantise(weight, bits, BLOCKS[bits]), quantise(weight.float(), bits, BLOCKS[bits])
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# tables


@both_widths
@pytest.mark.parametrize(("rows", "width"), [(9, 128), (9, 70), (1, 64), (1, 5)])
def test_rows_and_product_of_a_block_table(bits: int, rows: int, width: int) -> None:
    weight = random_weight(rows, width)
    made = BlockTable(weight, bits)
    plain = read_blocks(*quantise(weight, bits, BLOCKS[bits]), bits).reshape(rows, -1)[:, :width]
    index = torch.tensor([[0, rows - 1, 0], [rows // 2, 0, rows - 1]])
    np.testing.assert_allclose(made.rows(index), plain[index.numpy()], rtol=1e-6)
    x = random_weight(6, width, seed=1).view(2, 3, width)
    assert made.product(x).shape == (2, 3, rows)
    np.testing.assert_allclose(made.product(x), x.double().numpy() @ plain.T, atol=1e-4)


@both_widths
def test_the_products_operator_describes_itself_rightly(bits: int) -> None:
    """Its shapes without values, which export relies on, are those with values."""
    made = BlockTable(random_weight(7, 70), bits)
    arguments = (random_weight(3, 70), made.packed, made.scales, 70, bits, made.block)
    assert set(torch.library.opcheck(matmul_nbits, arguments).values()) == {"SUCCESS"}


@both_widths
@pytest.mark.parametrize("width", [128, 100, 33])
def test_onnx_runtime_reads_the_same_layout(bits: int, width: int) -> None:
    made = BlockTable(random_weight(7, width), bits)
    node = helper.make_node(
        "MatMulNBits", ["x", "packed", "scales"], ["y"], domain="com.microsoft", K=width, N=7, bits=bits,
        block_size=made.block, accuracy_level=1,
    )  # fmt: skip
    x_info, y_info = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
        for name, size in (("x", width), ("y", 7))
    )
    stored = [numpy_helper.from_array(getattr(made, name).numpy(), name) for name in ("packed", "scales")]
    graph = helper.make_graph([node], "product", [x_info], [y_info], stored)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = random_weight(5, width, seed=1)
    np.testing.assert_allclose(session.run(["y"], {"x": x.numpy()})[0], made.product(x), atol=1e-4)


def test_tables_by_bits() -> None:
    weight = random_weight(5, 70)
    full, halved = table(weight, 32), table(weight, 16)
    assert isinstance(full, Table) and full.weight.data_ptr() == weight.data_ptr()
    assert isinstance(halved, Table) and torch.equal(halved.weight, weight.half())
    for bits in (8, 4):
        made = table(weight, bits)
        assert isinstance(made, BlockTable) and (made.bits, made.block) == (bits, BLOCKS[bits])


@pytest.mark.parametrize("bits", [32, 16])
def test_rows_and_product_of_a_float_table(bits: int) -> None:
    weight, x, index = random_weight(9, 20), random_weight(4, 20, seed=1), torch.tensor([[3, 0], [8, 3]])
    made = table(weight, bits)
    expected = weight if bits == 32 else weight.half().float()
    assert made.rows(index).dtype == made.product(x).dtype == torch.float32
    assert torch.equal(made.rows(index), expected[index])
    torch.testing.assert_close(made.product(x), x @ expected.T, rtol=0, atol=1e-5 if bits == 32 else 0.03)


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_packed_bytes_are_those_of_a_table(bits: int) -> None:
    made = table(random_weight(6, 128), bits)
    assert packed_bytes(6 * 128, bits) == sum(tensor.nbytes for tensor in made.state_dict().values())


def test_divided_norm_equals_torchs() -> None:
    norm = nn.RMSNorm(20, 1e-5)
    nn.init.normal_(norm.weight)
    x = torch.cat([random_weight(5, 20), random_weight(5, 20, scale=1e-3)])  # eps counts in the small ones
    torch.testing.assert_close(DivNorm(norm)(x), norm(x), rtol=1e-5, atol=1e-6)


# the device half on tables

CONFIG = MoAConfig(
    target_hash="", target_layers=(0,), target_kv_heads=1, target_head_dim=4, vocab_size=60, draft_vocab_size=60,
    hidden_size=40, lsa_heads=1, lsa_kv_heads=1, lsa_mlp=8, heads=4, head_dim=10, sa_kv_heads=2, sa_mlp=70,
    ca_kv_heads=1, ca_mlp=50, rope_theta=500.0, norm_eps=1e-5, max_context=64, null_row=True, final_norm=True,
)  # fmt: skip

Case = tuple[int, bool, bool]
#: draft vocabulary, whether its ids are in order, whether the LM head is the embedding's
CASES: dict[str, Case] = {
    "tied, some tokens": (24, False, True),
    "tied, the first tokens": (24, True, True),
    "tied, all but one": (59, False, True),
    "tied, all tokens": (60, True, True),
    "tied, all tokens in another order": (60, False, True),
    "own head, some tokens": (24, False, False),
    "own head, all tokens": (60, True, False),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def random_half(case: Case, null_row: bool = True) -> DeviceHalf:
    count, ordered, tied = case
    half = DeviceHalf(replace(CONFIG, draft_vocab_size=count, null_row=null_row))
    generator = torch.Generator().manual_seed(7)
    for parameter in half.requires_grad_(False).parameters():
        parameter.normal_(0, 0.15, generator=generator)
        if parameter.dim() == 1:
            parameter += 1.0
    ids = torch.arange(60) if ordered else torch.randperm(60, generator=generator)
    half.draft_ids.copy_(ids[:count])
    if tied:
        half.head.weight.copy_(half.embedding.weight[half.draft_ids.long()])
    return half.eval()


def steps(config: MoAConfig) -> Iterator[tuple[Tensor, ...]]:
    for width, past, rows in ((1, 0, 1), (5, 7, 9), (20, 3, 1)):
        tokens, positions, _, *rest = example_inputs(config, width, past, rows)
        yield tokens, positions, torch.arange(width)[::2], *rest


@every_case
@pytest.mark.parametrize("null_row", [True, False])
def test_float_tables_change_nothing(case: Case, null_row: bool) -> None:
    half = random_half(case, null_row)
    rebuilt = rebuild(half, Profile("fp32", 32))
    assert torch.equal(rebuilt.draft_ids, half.draft_ids)
    for inputs in steps(half.config):
        for got, expected in zip(rebuilt(*inputs), half(*inputs), strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@every_case
def test_every_token_is_embedded_as_its_own_row(case: Case) -> None:
    half = random_half(case)
    every = torch.arange(60)
    embedding = rebuild(half, Profile("fp32", 32)).embedding
    assert torch.equal(embedding(every), half.embedding.weight)
    pairs = torch.randint(0, 60, (4, 5), generator=torch.Generator().manual_seed(1))
    assert torch.equal(embedding(pairs), half.embedding(pairs))
    for bits in (4, 8):
        coarse = rebuild(half, Profile("fp32", bits)).embedding(every)
        drafted = torch.isin(every, half.draft_ids.long())
        for tokens, wanted in ((every[drafted], bits), (every[~drafted], 4)):  # tokens never drafted take 4 bits
            assert torch.equal(coarse[tokens], BlockTable(half.embedding.weight, wanted).rows(tokens))


@every_case
def test_a_tied_table_is_stored_once(case: Case) -> None:
    count, ordered, tied = case
    half = random_half(case)
    assert is_tied(half) == tied
    rebuilt = rebuild(half, Profile("int8", 4))
    head, embedding = rebuilt.head, rebuilt.embedding
    assert isinstance(head, Linear) and isinstance(head.weights, BlockTable)
    if tied and count < 60:
        assert isinstance(embedding, SharedEmbedding) and embedding.head is head.weights
        assert isinstance(embedding.rest, BlockTable) and len(embedding.rest.packed) == 60 - count
        assert embedding.place.sort().values.tolist() == list(range(60))
    elif isinstance(embedding, SharedEmbedding):
        assert count < 60 and embedding.head is not head.weights
    else:
        assert (embedding.weights is head.weights) == (tied and ordered)
    assert head.weights.bits == 4 and len(head.weights.packed) == count


def test_one_other_row_is_not_tied() -> None:
    half = random_half(CASES["tied, some tokens"])
    half.head.weight[23, 39] += 1e-3
    assert not is_tied(half)
    assert isinstance(rebuild(half, Profile("fp32", 32)).embedding, Embedding)


@pytest.mark.parametrize("embedding_bits", [32, 4])
@pytest.mark.parametrize(("name", "bits"), [("fp32", 32), ("fp16", 16), ("int8", 8), ("int4", 4)])
def test_every_linear_and_norm_stands_on_the_profiles_tables(name: str, bits: int, embedding_bits: int) -> None:
    half = random_half(CASES["own head, some tokens"])
    rebuilt = rebuild(half, Profile(name, embedding_bits))
    kinds, replaced = ([type(module) for module in one.modules()] for one in (rebuilt, half))
    assert not {nn.Linear, nn.RMSNorm, nn.Embedding, nn.Identity} & set(kinds)
    assert kinds.count(Linear) == replaced.count(nn.Linear) and kinds.count(DivNorm) == replaced.count(nn.RMSNorm)
    for module in rebuilt.modules():
        if isinstance(module, Linear):
            wanted = embedding_bits if module is rebuilt.head else bits
            made = module.weights
            assert wanted == (made.bits if isinstance(made, BlockTable) else 8 * made.weight.itemsize)


@every_case
@pytest.mark.parametrize(
    ("name", "bits", "least"), [("fp16", 16, 0.99999), ("int8", 8, 0.99), ("int4", 4, 0.9), ("fp32", 4, 0.95)]
)
def test_coarse_logits_follow_the_eager_ones(case: Case, name: str, bits: int, least: float) -> None:
    half = random_half(case)
    rebuilt = rebuild(half, Profile(name, bits))
    *_, inputs = steps(half.config)
    got, expected = rebuilt(*inputs)[0], half(*inputs)[0]
    assert got.dtype == torch.float32 and not torch.equal(got, expected)
    assert np.corrcoef(got.flatten(), expected.flatten())[0, 1] > least


@pytest.mark.parametrize("profile", [Profile("fp32", 32), Profile("fp16", 16), Profile("int4", 4)], ids=str)
@every_case
def test_rebuilding_leaves_the_original_as_it_was(case: Case, profile: Profile) -> None:
    half = random_half(case)
    before, kinds = copy.deepcopy(half.state_dict()), [type(module) for module in half.modules()]
    addresses = {name: tensor.data_ptr() for name, tensor in half.state_dict().items()}
    rebuilt = rebuild(half, profile)
    for name, tensor in rebuilt.state_dict().items():
        if not name.startswith(("embedding.", "head.")):  # large untied tables may be shared
            tensor.zero_()
    assert [type(module) for module in half.modules()] == kinds
    assert {name: tensor.data_ptr() for name, tensor in half.state_dict().items()} == addresses
    for name, tensor in half.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("quant_name", ["fp32", "int4"])
def test_an_embedding_of_its_own_is_not_copied(quant_name: str) -> None:
    half = random_half(CASES["own head, all tokens"])
    rebuilt = rebuild(half, Profile(quant_name, 32))
    assert rebuilt.embedding.weights.weight.data_ptr() == half.embedding.weight.data_ptr()
    if quant_name == "fp32":
        assert rebuilt.head.weights.weight.data_ptr() == half.head.weight.data_ptr()


def test_a_copy_without_tables_holds_everything_else() -> None:
    half = random_half(CASES["own head, all tokens"])
    copied = without_tables(half).state_dict()
    assert copied.keys() == {name for name in half.state_dict() if not name.startswith(("embedding.", "head."))}
    for name, tensor in copied.items():
        original = half.state_dict()[name]
        assert torch.equal(tensor, original) and tensor.data_ptr() != original.data_ptr()
