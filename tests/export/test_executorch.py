"""ExecuTorch programs: they agree with the eager model, know what they are, and draft as ONNX Runtime does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from export.bundle.blocks import quantise
from export.bundle.facts import check_metadata, facts
from export.bundle.steps import example_inputs
from outrider_core.drafting.bundle import Bundle, BundleError, open_bundle
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.drafting.engines import Engine, open_engine
from outrider_core.drafting.engines.executorch import ExecuTorchEngine
from outrider_core.drafting.row_cost import USUAL
from outrider_core.models.moa import DeviceHalf
from outrider_core.protocol.sampling import Sampling
from tests.edge_runtime.test_probe import check_memory_and_load, figures_of
from tests.export.conftest import Bundles, correlation, difference, edit_manifest, only_drafted, tree_inputs
from tests.tiny import EOS

#: (tokens before the step, feature rows); at most the 256 tokens and the tree that the program is made for
SIZES = [(0, 1), (1, 2), (5, 64), (64, 1), (191, 257), (768, 3)]
#: quant, embedding_bits (None: the default), least correlation of any output with the eager model's on tokens of the
#: draft vocabulary and on all
KINDS = [
    pytest.param("int4", None, 0.93, 0.9, marks=pytest.mark.slow),
    pytest.param("int8", None, 0.999, 0.96, marks=pytest.mark.slow),
    pytest.param("int4", 4, 0.9, 0.9, marks=pytest.mark.slow),
    pytest.param("int8", 4, 0.95, 0.95, marks=pytest.mark.slow),
    pytest.param("fp32", 8, 0.999, 0.96, marks=pytest.mark.slow),
]


def open_pte(folder: Path) -> ExecuTorchEngine:
    engine = open_engine(open_bundle(folder), "executorch", threads=1)
    assert isinstance(engine, ExecuTorchEngine)
    return engine


def test_one_float32_program_equals_the_eager_model_at_every_size(bundles: Bundles, half: DeviceHalf) -> None:
    engine = open_pte(bundles("fp32", "executorch"))
    for past, rows in SIZES:
        for width in (1, 2, 5, 17, 64):
            assert difference(engine, half, example_inputs(half.config, width, past, rows, width)) < 1e-4
            assert difference(engine, half, tree_inputs(half.config, width, past, rows, width)) < 1e-4


@pytest.mark.parametrize(("quant", "embedding_bits", "drafted", "every"), KINDS)
def test_integers_agree_with_the_eager_model(
    bundles: Bundles, half: DeviceHalf, quant: str, embedding_bits: int | None, drafted: float, every: float
) -> None:
    engine = open_pte(bundles(quant, "executorch", embedding_bits))
    for past, rows in SIZES:
        steps = [tree_inputs(half.config, width, past, rows, width) for width in (1, 2, 5, 17, 64)]
        assert every < correlation(engine, half, steps) < 0.99999, (past, rows)
        assert drafted < correlation(engine, half, [only_drafted(half, inputs) for inputs in steps]), (past, rows)


def test_inputs_are_left_as_they_are(bundles: Bundles, half: DeviceHalf) -> None:
    engine = open_pte(bundles("fp32", "executorch"))
    inputs = [x.numpy() for x in tree_inputs(half.config, 9, 5, 3)]
    before = [x.copy() for x in inputs]
    first = engine.step(*inputs)
    kept = [x.copy() for x in first]
    engine.step(*(x.numpy() for x in tree_inputs(half.config, 9, 5, 3, seed=1)))
    assert all(np.array_equal(a, b) for a, b in zip(before, inputs, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(kept, first, strict=True)), "outputs are overwritten"


@pytest.mark.parametrize("kind", ["fp32", pytest.param("int4", marks=pytest.mark.slow)])
def test_constant_methods_are_the_manifests(bundles: Bundles, kind: str) -> None:
    bundle = open_bundle(bundles(kind, "executorch"))
    metadata = open_pte(bundle.folder).metadata
    assert metadata.keys() == facts(bundle.manifest).keys()
    assert (metadata["get_vocab_size"], metadata["get_draft_vocab_size"], metadata["get_eos_ids"]) == (199, 64, EOS)
    assert (metadata["get_max_context_len"], metadata["get_max_seq_len"]) == (256, 64)
    assert metadata["get_drafter_hash"] == bundle.manifest.drafter_hash
    assert metadata["use_kv_cache"] is True and metadata["enable_dynamic_shape"] is True
    check_metadata(bundle, "executorch")


@pytest.mark.parametrize("field", ["max_context", "eos_ids", "drafter_hash", "vocab_size", "hidden_size"])
def test_other_metadata_is_refused(bundles: Bundles, tmp_path: Path, field: str) -> None:
    folder = Path(shutil.copytree(bundles("fp32", "executorch"), tmp_path / "bundle"))
    value = {"eos_ids": [EOS, 9], "drafter_hash": "0" * 16}.get(field, 255)
    edit_manifest(folder, lambda m: m.update({field: value}))
    with pytest.raises(BundleError, match=r"drafter\.pte says get_.* the manifest .*; export the bundle again$"):
        check_metadata(open_bundle(folder), "executorch")


@pytest.mark.parametrize("kind", ["fp32", pytest.param("int4", marks=pytest.mark.slow)])
def test_report_shows_what_is_delegated(bundles: Bundles, kind: str) -> None:
    folder = bundles(kind, "executorch")
    lowering = json.loads((folder / "report.json").read_text())["engines"]["executorch"]["lowering"]
    operators = lowering["operators"]
    linears, left = operators["aten_linear_default"]
    assert linears >= 13 and not left, "a linear is not delegated"
    assert lowering["delegated"] == sum(yes for yes, _ in operators.values()) > 50
    assert lowering["not_delegated"] == sum(no for _, no in operators.values())
    assert lowering["subgraphs"] >= 1
    text = (folder / "report.md").read_text()
    assert f"{lowering['delegated']} operators delegated in {lowering['subgraphs']} subgraphs" in text
    assert f"| aten_linear_default | {linears} | 0 |" in text


def holds(folder: Path, values: torch.Tensor) -> bool:
    return values.detach().numpy().tobytes() in (folder / "drafter.pte").read_bytes()


def test_float32_weights_are_stored_as_they_are(bundles: Bundles, half: DeviceHalf) -> None:
    folder = bundles("fp32", "executorch")
    assert all(holds(folder, weight) for name, weight in half.named_parameters() if weight.dim() == 2), "a weight"


@pytest.mark.parametrize(
    ("quant", "embedding_bits"),
    [
        pytest.param("int4", 8, marks=pytest.mark.slow),
        pytest.param("int8", 8, marks=pytest.mark.slow),
        pytest.param("int4", 4, marks=pytest.mark.slow),
        pytest.param("int8", 4, marks=pytest.mark.slow),
    ],
)
def test_integers_are_stored_instead_of_floats(
    bundles: Bundles, half: DeviceHalf, quant: str, embedding_bits: int
) -> None:
    folder = bundles(quant, "executorch", None if embedding_bits == 8 else embedding_bits)
    assert not any(holds(folder, weight) for weight in half.parameters() if weight.dim() == 2)
    rare = torch.ones(half.config.vocab_size, dtype=torch.bool)
    rare[half.draft_ids.long()] = False
    tables = [(~rare, embedding_bits), (rare, 4)] if embedding_bits == 8 else [(rare | ~rare, 4)]
    for rows, bits in tables:
        packed, scales = map(torch.from_numpy, quantise(half.embedding.weight[rows].numpy(), bits))
        assert holds(folder, packed) and holds(folder, scales)


def drafter(bundle: Bundle, engine: Engine) -> Drafter:
    manifest = bundle.manifest
    return Drafter(
        engine, bundle.draft_ids, bundle.row_shape, manifest.sa_kv_heads, manifest.max_context, True, bundle.null_row,
        row_cost=USUAL,
    )  # fmt: skip


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)], ids=["greedy", "sampled"])
def test_both_engines_draft_the_same_trees(bundles: Bundles, half: DeviceHalf, sampling: Sampling) -> None:
    opened = {name: open_bundle(bundles("fp32", name)) for name in ("onnx", "executorch")}
    drafters = [drafter(bundle, open_engine(bundle, name, threads=1)) for name, bundle in opened.items()]
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(4, 199, (90,), generator=generator).tolist()
    rows = torch.randn(90, 2, half.config.ca_kv_heads, half.config.head_dim, generator=generator).numpy()
    shape = TreeShape(nodes=24, depth=6, breadth=5)
    for length, seen in ((1, 0), (40, 0), (40, 30), (89, 80)):
        for one in drafters:
            one.add_rows(np.arange(seen), rows[:seen])
        trees = [one.draft(prefix[:length], sampling, shape).tree for one in drafters]
        assert trees[0] == trees[1] and len(trees[0].tokens) == 24
        assert len({one.next_token(prefix[: length + 1], sampling)[0] for one in drafters}) == 1


@pytest.mark.slow
def test_probe_measures_it_as_it_does_onnx(bundles: Bundles) -> None:
    options = ("--engine", "executorch", "--widths", "1,5", "--contexts", "1,50", "--repeats", 2)
    figures = figures_of(bundles("fp32", "executorch"), *options)
    check_memory_and_load(figures)
    assert figures["engine"] == "executorch" and len(figures["steps"]) == 4
