"""The drafter's ONNX graph against the eager device half: every layout of its tables, every shape of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from export.bundle.blocks import BITS, Profile, dequantise, quantise
from export.bundle.steps import example_inputs
from export.bundle.to_onnx import DATA_FROM, accuracy_levels, data_file, write_onnx
from export.bundle.torch_tables import BlockTable, SplitEmbedding, Table, embedding, without_tables
from outrider_core.drafting.engines.onnx import OnnxEngine
from outrider_core.models.moa import DeviceHalf
from outrider_core.models.moa_config import MoAConfig
from tests.export.conftest import rounded
from tests.tiny import arrays_of

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


def filled(half: DeviceHalf) -> DeviceHalf:
    """Random weights, gains about one."""
    generator = torch.Generator().manual_seed(7)
    for parameter in half.requires_grad_(False).parameters():
        parameter.normal_(0, 0.15, generator=generator)
        if parameter.dim() == 1:
            parameter += 1.0
    return half.eval()


def random_half(case: Case, null_row: bool = True, final_norm: bool = True) -> DeviceHalf:
    count, ordered, tied = case
    half = filled(DeviceHalf(replace(CONFIG, draft_vocab_size=count, null_row=null_row, final_norm=final_norm)))
    ids = torch.arange(60) if ordered else torch.randperm(60, generator=torch.Generator().manual_seed(8))
    half.draft_ids.copy_(ids[:count])
    if tied:
        half.head.weight.copy_(half.embedding.weight[half.draft_ids.long()])
    return half


def steps(config: MoAConfig) -> Iterator[tuple[Tensor, ...]]:
    for width, past, rows in ((1, 0, 1), (5, 7, 9), (20, 3, 1)):
        tokens, positions, _, *rest = example_inputs(config, width, past, rows)
        yield tokens, positions, torch.arange(width)[::2], *rest


def engine(half: DeviceHalf, profile: Profile, folder: Path, float_activations: bool = False) -> OnnxEngine:
    path = folder / "drafter.onnx"
    write_onnx(half.config, arrays_of(half), profile, path, {})
    if float_activations:
        return dict(accuracy_levels(path))[1]
    return OnnxEngine(path, 1)


def gap(engine: OnnxEngine, half: DeviceHalf, inputs: tuple[Tensor, ...]) -> float:
    """Largest difference of any output."""
    with torch.inference_mode():
        wanted = [x.numpy() for x in half(*inputs)]
    got = engine.step(*(x.numpy() for x in inputs))  # type: ignore[call-arg]
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, np.float32) for x in wanted]
    return max(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))


@every_case
@pytest.mark.parametrize("null_row", [True, False])
@pytest.mark.parametrize("final_norm", [True, False])
def test_in_float32_it_is_the_eager_model(case: Case, null_row: bool, final_norm: bool, tmp_path: Path) -> None:
    half = random_half(case, null_row, final_norm)
    run = engine(half, Profile("fp32", 32), tmp_path)
    for inputs in steps(half.config):
        assert gap(run, half, inputs) < 1e-4


@every_case
@pytest.mark.parametrize(
    "profile", [Profile("fp16", 16), Profile("int8", 8), Profile("int4", 8), Profile("int4", 4), Profile("fp32", 4)],
    ids=str,
)  # fmt: skip
def test_rounded_weights_are_the_only_difference(case: Case, profile: Profile, tmp_path: Path) -> None:
    half = random_half(case)
    run = engine(half, profile, tmp_path, float_activations=True)
    for inputs in steps(half.config):
        assert gap(run, rounded(half, profile), inputs) < 1e-4 < gap(run, half, inputs)


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 1, 2), (4, 2, 4), (1, 1, 1)], ids=str)
def test_any_grouping_of_heads(heads: tuple[int, int, int], tmp_path: Path) -> None:
    shape = dict(zip(("heads", "sa_kv_heads", "ca_kv_heads"), heads, strict=True))
    half = filled(DeviceHalf(replace(CONFIG, **shape)))
    run = engine(half, Profile("fp32", 32), tmp_path)
    for inputs in steps(half.config):
        assert gap(run, half, inputs) < 1e-4


@every_case
def test_a_tied_table_is_stored_once(case: Case, tmp_path: Path) -> None:
    count, ordered, tied = case
    half = random_half(case)
    engine(half, Profile("int8", 4), tmp_path)
    stored = {t.name: tuple(t.dims) for t in onnx.load(tmp_path / "drafter.onnx").graph.initializer}
    tables = {name.removesuffix(".packed"): dims[0] for name, dims in stored.items() if name.endswith(".packed")}
    tables = {name: rows for name, rows in tables.items() if name.startswith(("head", "embedding"))}
    if count == 60:
        assert tables == ({"head": 60} if tied and ordered else {"head": 60, "embedding": 60})
    elif tied:
        assert tables == {"head": count, "embedding.rare": 60 - count}
    else:
        assert tables == {"head": count, "embedding": 60}


def test_one_other_row_is_not_tied(tmp_path: Path) -> None:
    half = random_half(CASES["tied, some tokens"])
    half.head.weight[23, 39] += 1e-3
    run = engine(half, Profile("fp32", 32), tmp_path)
    assert max(gap(run, half, inputs) for inputs in steps(half.config)) < 1e-4


@pytest.mark.parametrize(("name", "nodes"), [("int8", {8: 9}), ("int4", {4: 8, 8: 1})])
def test_what_reads_the_same_row_is_one_product(name: str, nodes: dict[int, int], tmp_path: Path) -> None:
    half = random_half(CASES["tied, some tokens"])
    engine(half, Profile(name, 8), tmp_path)
    products = [n for n in onnx.load(tmp_path / "drafter.onnx").graph.node if n.op_type == "MatMulNBits"]
    attributes = [{a.name: a.i for a in node.attribute} for node in products]
    assert {bits: sum(a["bits"] == bits for a in attributes) for bits in nodes} == nodes
    assert {(a["bits"], a["block_size"], a["accuracy_level"]) for a in attributes} <= {(8, 64, 4), (4, 32, 4)}


def test_large_tensors_lie_at_page_boundaries_in_a_file_of_their_own(tmp_path: Path) -> None:
    half = filled(DeviceHalf(replace(CONFIG, vocab_size=14_000, draft_vocab_size=14_000)))
    path = tmp_path / "drafter.onnx"
    write_onnx(half.config, arrays_of(half), Profile("fp32", 32), path, {"made": "here"})
    model = onnx.load(path, load_external_data=False)
    assert [(p.key, p.value) for p in model.metadata_props] == [("made", "here")]
    large = [t for t in model.graph.initializer if t.external_data]
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in large]
    assert len(large) == 2 and {place["location"] for place in places} == {data_file(path).name}
    assert all(int(place["offset"]) % 4096 == 0 and int(place["length"]) >= DATA_FROM for place in places)
    assert max(gap(OnnxEngine(path, 1), half, inputs) for inputs in steps(half.config)) < 1e-4
    write_onnx(CONFIG, arrays_of(random_half(CASES["tied, all tokens"])), Profile("fp32", 32), path, {})
    assert not data_file(path).exists()  # of a smaller drafter in its place


# tables for ExecuTorch


@every_case
def test_every_token_is_embedded_as_its_own_row(case: Case) -> None:
    half, every = random_half(case), torch.arange(60)
    assert torch.equal(embedding(half, Profile("fp32", 32))(every), half.embedding.weight)
    pairs = torch.randint(0, 60, (4, 5), generator=torch.Generator().manual_seed(1))
    drafted = torch.isin(every, half.draft_ids.long())
    for bits in (4, 8, 16):
        made = embedding(half, Profile("fp32", bits))
        assert torch.equal(made(pairs), made(every)[pairs])
        for tokens, wanted in ((every[drafted], bits), (every[~drafted], min(bits, 4) if bits < 16 else bits)):
            kept = rounded(half, Profile("fp32", wanted)).embedding.weight[tokens]
            if wanted == 8 and bits == 8:
                kept = torch.from_numpy(dequantise(*quantise(half.embedding.weight.numpy(), 8), 40).copy())[tokens]
            torch.testing.assert_close(made(tokens), kept, rtol=1e-6, atol=0)
        assert isinstance(made, SplitEmbedding if bits == 8 and case[0] < 60 else (Table, BlockTable))


def test_a_copy_without_tables_holds_everything_else() -> None:
    half = random_half(CASES["own head, all tokens"])
    copied = without_tables(half).state_dict()
    assert copied.keys() == {name for name in half.state_dict() if not name.startswith(("embedding.", "head."))}
    for name, tensor in copied.items():
        original = half.state_dict()[name]
        assert torch.equal(tensor, original) and tensor.data_ptr() != original.data_ptr()


def test_profiles_are_named_by_their_linears() -> None:
    assert {name: Profile(name, 32).bits for name in BITS} == {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
