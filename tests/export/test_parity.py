"""ONNX engines against the eager model, and how that is measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from export.bundle.blocks import Profile
from export.bundle.parity import NEAR_TIE, compare
from export.bundle.steps import (
    ANSWER_TOKENS,
    LOOKAHEAD,
    PROMPTS,
    Passage,
    example_inputs,
    follow,
    passages_for,
    roots,
)
from export.bundle.to_onnx import accuracy_levels
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.drafting.engines import Floats, Ints, open_engine
from outrider_core.drafting.engines.onnx import OnnxEngine
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.eager import EagerEngine
from outrider_core.models.moa import DeviceHalf
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.target import load_target, open_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.export.conftest import (
    Bundles,
    Folders,
    correlation,
    difference,
    expected,
    only_drafted,
    rounded,
    stored,
    tree_inputs,
)
from tests.tiers import first, quick
from tests.tiny import plain_decode

#: (tokens before the step, feature rows)
SIZES = [(0, 1), (1, 2), (5, 64), (64, 1), (191, 257)]
#: quant, embedding_bits (None: the default) -> least correlation of any output with the eager model's, on tokens of
#: the draft vocabulary and on all
CORRELATIONS = {
    ("int8", None): (0.999, 0.98), ("int4", None): (0.95, 0.93), ("int4", 4): (0.92, 0.92), ("fp32", 4): (0.97, 0.97),
}  # fmt: skip


def onnx_engine(folder: Path) -> OnnxEngine:
    return cast(OnnxEngine, open_engine(open_bundle(folder), "onnx", threads=1))


# engines


@pytest.mark.parametrize(("past", "rows"), first(2, SIZES[::-1]))
def test_float32_equals_the_eager_model_at_every_width(
    bundles: Bundles, half: DeviceHalf, past: int, rows: int
) -> None:
    engine = onnx_engine(bundles())
    for width in range(1, 65):
        assert difference(engine, half, example_inputs(half.config, width, past, rows, width)) < 1e-4, width
        assert difference(engine, half, tree_inputs(half.config, width, past, rows, width)) < 1e-4, width


@pytest.mark.parametrize("wanted", [[0], [4], [3, 1], [0, 1, 2, 3, 4], [2, 2]], ids=str)
def test_engine_gives_the_wanted_steps_only(bundles: Bundles, half: DeviceHalf, wanted: list[int]) -> None:
    inputs = list(example_inputs(half.config, 5, 3, 2))
    inputs[2] = torch.tensor(wanted)
    engine = onnx_engine(bundles())
    assert difference(engine, half, tuple(inputs)) < 1e-4
    inputs[2] = torch.arange(5)
    every = engine.step(*(x.numpy() for x in inputs))[0]
    inputs[2] = torch.tensor(wanted)
    assert np.array_equal(engine.step(*(x.numpy() for x in inputs))[0].argmax(-1), every[wanted].argmax(-1))


def test_half_precision_is_close_to_the_eager_model(bundles: Bundles, half: DeviceHalf) -> None:
    engine = onnx_engine(bundles("fp16"))
    for past, rows in SIZES:
        for width in (1, 5, 64):
            inputs = tree_inputs(half.config, width, past, rows, width)
            assert 0 < difference(engine, half, inputs) < 1e-2 * logits_size(half, inputs)


@torch.inference_mode()
def logits_size(half: DeviceHalf, inputs: tuple[torch.Tensor, ...]) -> float:
    return max(1.0, float(half(*inputs)[0].abs().max()))


QUICK = {("int8", None), ("int4", 4)}


@pytest.mark.parametrize(("quant", "embedding_bits"), quick(QUICK, CORRELATIONS))
def test_integers_agree_with_the_eager_model(
    bundles: Bundles, half: DeviceHalf, quant: str, embedding_bits: int | None
) -> None:
    engine = onnx_engine(bundles(quant, embedding_bits=embedding_bits))
    for past, rows in SIZES:
        steps = [tree_inputs(half.config, width, past, rows, width) for width in (1, 2, 5, 8, 33, 64)]
        drafted = [only_drafted(half, inputs) for inputs in steps]
        for least, inputs in zip(CORRELATIONS[quant, embedding_bits], (drafted, steps), strict=True):
            assert least < correlation(engine, half, inputs) < 0.99999, (past, rows)


@pytest.mark.parametrize(("quant", "embedding_bits"), [("int8", 8), ("int4", 8), ("int4", 4)])
def test_with_float_activations_the_weights_are_the_only_difference(
    bundles: Bundles, half: DeviceHalf, quant: str, embedding_bits: int
) -> None:
    asked = None if embedding_bits == 8 else embedding_bits
    engines = dict(accuracy_levels(bundles(quant, embedding_bits=asked) / "drafter.onnx"))
    assert engines.keys() == {4, 1}
    inputs = tree_inputs(half.config, 20, 7, 9)
    kept = rounded(half, Profile(quant, embedding_bits))
    assert difference(engines[1], kept, inputs) < 1e-4 < difference(engines[4], kept, inputs)


# what is stored


@pytest.mark.parametrize(
    ("quant", "embedding_bits", "bits"),
    [
        ("fp32", None, (32, 32)), ("fp16", None, (16, 16)), ("int8", None, (8, 8)), ("int4", None, (4, 8)),
        ("int4", 4, (4, 4)), pytest.param("fp32", 4, (32, 4), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_weights_are_stored_in_as_many_bits(
    bundles: Bundles, half: DeviceHalf, quant: str, embedding_bits: int | None, bits: tuple[int, int]
) -> None:
    found, wanted = stored(bundles(quant, embedding_bits=embedding_bits)), expected(half, *bits, tied=False)
    for kind in (TensorProto.UINT8, TensorProto.FLOAT16):
        assert found[kind] == wanted[kind]
    assert 0 <= found[TensorProto.FLOAT] - wanted[TensorProto.FLOAT] < 1024  # norms and angles
    assert found[TensorProto.INT64] + found[TensorProto.INT32] < 4 * half.config.vocab_size + 1024


@pytest.mark.parametrize(("quant", "bits"), [("int8", {8: 9}), ("int4", {4: 8, 8: 1})])
def test_linears_that_read_the_same_row_are_one_operator(bundles: Bundles, quant: str, bits: dict[int, int]) -> None:
    nodes = [n for n in onnx.load(bundles(quant) / "drafter.onnx").graph.node if n.op_type == "MatMulNBits"]
    attributes = [{a.name: a.i for a in node.attribute} for node in nodes]
    assert Counter(a["bits"] for a in attributes) == bits
    assert {a["block_size"] for a in attributes if a["bits"] == 4} <= {32}
    assert {a["accuracy_level"] for a in attributes} == {4}


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_flips_are_reported_for_both_accuracy_levels(bundles: Bundles, quant: str) -> None:
    report = json.loads((bundles(quant) / "report.json").read_text())["engines"]["onnx"]
    levels = report["accuracy_levels"]
    assert levels.keys() == {"4", "1"} and report["accuracy_level"] == 4
    assert levels["4"] == report["parity"] != levels["1"]
    for figures in levels.values():
        assert 0 < figures["flips_at_near_ties"] <= figures["flips"] < figures["steps"]
        assert figures["top1_agreement"] == pytest.approx(1 - figures["flips"] / figures["steps"], abs=1e-4)
    assert 0 < levels["1"]["mean_abs_logit_error"] < levels["4"]["mean_abs_logit_error"]
    assert "| figure | accuracy_level 4 | accuracy_level 1 |" in (bundles(quant) / "report.md").read_text()


# how agreement is measured

#: what the drafter of these tests can propose
DRAFTED = [10, 20, 30, 40, 50]


class Written:
    """An engine that answers with one row of `logits` per position."""

    def __init__(self, logits: list[list[float]]) -> None:
        self.logits = np.array(logits, np.float32)

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        empty = np.zeros((len(tokens), *sa_keys.shape[1:]), np.float32)
        return self.logits[positions[wanted]], empty, empty


#: (the token that follows, eager logits, the engine's) from position 2 on
STEPS: list[tuple[int, list[float], list[float]]] = [
    (10, [9, 5, 0, 0, 0], [9, 5, 0, 0, 0]),  # the same, and right
    (30, [1, 9, 7, 0, 0], [1, 8, 9, 0, 0]),  # a flip, to the right token
    (40, [0, 0, 5, 5.3, 0], [0, 0, 5.5, 5.3, 0]),  # a flip at a near-tie, from the right token
    (99, [9, 0, 0, 0, 0], [1, 2, 3, 4, 5]),  # a flip, with the eager argmax the last of five
    (50, [0, 0, 0, 4, 4.25], [0, 0, 0, 4, 4.25]),  # a near-tie, the same and right
    (10, [0, 2.5, 2, 1, 0], [0, 2, 2.5, 1, 0]),  # a flip; half a logit is no near-tie any more
    (20, [0, 3, 2.75, 0, 0], [0, 2.5, 2.75, 0, 0]),  # a flip at a near-tie
    (20, [0, 9, 0, 0, 0], [0, 9, 0, 0, 0]),
    (20, [0, 9, 0, 0, 0], [0, 9, 0, 0, 0]),
    (20, [0, 9, 0, 0, 0], [0, 9, 0, 0, 0]),
    (20, [9, 0, 0, 0, 0], [9, 0, 0, 0, 0]),  # the same, and wrong
    (20, [9, 0, 0, 0, 0], [9, 0, 0, 0, 0]),
]


def test_agreement_is_counted_step_by_step(half: DeviceHalf) -> None:
    nothing = [0.0] * 5
    eager, engine = (Written([nothing, nothing, *(step[side] for step in STEPS)]) for side in (1, 2))
    tokens = np.array([7, 7, 7, *(step[0] for step in STEPS)], np.int64)
    rows = np.zeros((len(tokens), 2, half.config.ca_kv_heads, half.config.head_dim), np.float32)
    bundle = cast(Bundle, SimpleNamespace(null_row=None, draft_ids=np.array(DRAFTED)))
    parity = compare(engine, eager, half.config, bundle, [Passage(tokens, rows, 2)])
    assert NEAR_TIE == 0.5
    assert parity.as_dict() == {
        "steps": 12,
        "top1_agreement": round(7 / 12, 4),
        "top4_agreement": round(11 / 12, 4),
        "flips": 5,
        "flips_at_near_ties": 2,
        "mean_abs_logit_error": round((1 + 2 + 0.5 + 22 + 0.5 + 0.5 + 0.5) / (5 * 12), 5),
        "max_abs_logit_error": 8.0,
        "eager_hits": round(7 / 12, 4),
        "hits": round(6 / 12, 4),
    }


def test_passages_count_by_their_steps(half: DeviceHalf) -> None:
    """A passage of two roots, where all steps agree, and one of one root, where none does."""
    same, other = [9.0, 0, 0, 0, 0], [0.0, 9, 0, 0, 0]
    rows = np.zeros((20, 2, half.config.ca_kv_heads, half.config.head_dim), np.float32)
    passages = [Passage(np.zeros(13, np.int64), rows[:13], 0), Passage(np.zeros(20, np.int64), rows, 13)]
    assert [len(roots(passage)) for passage in passages] == [2, 1]
    bundle = cast(Bundle, SimpleNamespace(null_row=None, draft_ids=np.array(DRAFTED)))
    eager, engine = Written([same] * 20), Written([same] * 13 + [other] * 7)
    parity = compare(engine, eager, half.config, bundle, passages)
    assert (parity.steps, parity.flips, parity.top1_agreement) == (18, 6, round(12 / 18, 4))


@pytest.mark.parametrize("with_null_row", [True, False])
@pytest.mark.parametrize(("length", "start"), [(150, 60), (71, 64), (20, 0), (129, 1)])
def test_following_a_passage_is_one_pass_over_it(
    half: DeviceHalf, with_null_row: bool, length: int, start: int
) -> None:
    config, generator = half.config, torch.Generator().manual_seed(length)
    tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
    rows = torch.randn(length, 2, config.ca_kv_heads, config.head_dim, generator=generator)
    null_row = rows[-1].numpy() + 1 if with_null_row else None
    passage = Passage(tokens.numpy(), rows.numpy(), start)
    drafted = list(follow(EagerEngine(half), config, null_row, passage))
    assert len(drafted) == len(roots(passage)) == -(-(length - start - LOOKAHEAD) // LOOKAHEAD)
    for root, logits in zip(roots(passage), drafted, strict=True):
        assert np.abs(logits - one_pass(half, tokens[: root + LOOKAHEAD], rows[:root], null_row)).max() < 1e-4


@torch.inference_mode()
def one_pass(half: DeviceHalf, tokens: torch.Tensor, rows: torch.Tensor, null_row: Floats | None) -> Floats:
    """The eager model's last LOOKAHEAD logits on all tokens at once."""
    config, size = half.config, len(tokens)
    seen = [torch.from_numpy(null_row)[None]] if null_row is not None else []
    if not len(rows) and not seen:
        seen = [torch.zeros(1, *rows.shape[1:])]
    keys = torch.zeros(0, config.sa_kv_heads, config.head_dim)
    visible = torch.cat([*seen, rows])
    mask = torch.full((size, size), -1e9).triu(1)
    wanted = torch.arange(size - LOOKAHEAD, size)
    result: Floats = half(tokens, torch.arange(size), wanted, mask, keys, keys, visible[:, 0], visible[:, 1])[0].numpy()
    return result


def test_example_mask_is_causal(half: DeviceHalf) -> None:
    mask = example_inputs(half.config, 3, 2, 0)[3]
    assert (mask == 0.0).tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]


def make_passages(folders: Folders, tmp_path: Path, load: bool) -> tuple[MoAConfig, list[Passage]]:
    config, tensors, _ = load_drafter(folders.drafter)
    return config, passages_for(open_target(TargetSource.resolve(str(folders.target))), config, tensors, tmp_path, load)


def test_passages_are_the_targets_own_greedy_answers(folders: Folders, tmp_path: Path) -> None:
    config, passages = make_passages(folders, tmp_path, load=True)
    target = load_target(TargetSource.resolve(str(folders.target)))
    assert len(passages) == len(PROMPTS)
    for passage in passages[:3]:
        prompt, answer = passage.tokens[: passage.start].tolist(), passage.tokens[passage.start :].tolist()
        assert answer == plain_decode(target.model, prompt, Sampling(), ANSWER_TOKENS)
        assert passage.rows.shape == (len(passage.tokens), 2, config.ca_kv_heads, config.head_dim)
        assert np.isfinite(passage.rows).all() and passage.rows.std() > 0.01


def test_answers_are_kept_for_an_interrupted_export(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = make_passages(folders, tmp_path, load=True)

    def decode(*_: Any) -> None:
        raise AssertionError("the target answers again")

    monkeypatch.setattr("export.train.answers.SlotDecoder.prefill", decode)
    _, second = make_passages(folders, tmp_path, load=True)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.rows, b.rows)


def test_a_target_too_large_to_run_is_replaced_by_random_rows(folders: Folders, tmp_path: Path) -> None:
    config, passages = make_passages(folders, tmp_path, load=False)
    assert len(passages) > 5 and not list(tmp_path.iterdir())
    for passage in passages:
        assert len(passage.tokens) > 2 * LOOKAHEAD and len(roots(passage)) >= 1
        assert passage.rows.shape == (len(passage.tokens), 2, config.ca_kv_heads, config.head_dim)
        assert passage.rows.std() > 0.5
