"""Weights are rounded by what the target reads while it writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.calibration import ANSWER_TOKENS, PROMPTS, InputMoments, write_texts
from outrider_core.targets.convert import make_target_bundle
from outrider_core.targets.part import Part
from outrider_core.targets.products import open_session
from outrider_core.targets.quantise import _inverse, quantise8
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.source import TargetSource
from outrider_core.targets.weights import Floats
from tests.targets.plain import lowered
from tests.tiny import tiny_model

TEXTS = [[5, 9, 11, 40, 41, 42, 3], [*range(20, 90)]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TargetBundle:
    return lowered(tiny_model(hidden=64, layers=3, dtype=torch.float32), tmp_path_factory.mktemp("plain"))


def inputs(seed: int, width: int, count: int) -> Floats:
    """Inputs of which some go together, as those of a model do."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((width, width)) * np.exp(-np.arange(width) / 8)[:, None]
    return np.asarray(rng.standard_normal((count, width)) @ mixing, np.float32)


def moments_of(x: Floats) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide.T @ wide


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(32, 150), st.sampled_from([3, 1030]))
def test_outputs_change_less_than_by_rounding_to_nearest(seed: int, width: int, outputs: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((outputs, width), np.float32)
    x = inputs(seed, width, 40 * width)

    def change(moments: NDArray[np.float64] | None) -> float:
        table, scales = quantise8(weight, moments)
        assert table.min() >= -127
        return float(np.square(x @ (table * scales[:, None] - weight).T).mean())

    assert change(moments_of(x)) < 0.7 * change(None)


@given(st.integers(0, 99))
def test_where_inputs_say_nothing_weights_are_rounded_to_nearest(seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((5, 16), np.float32)
    nearest, scales = quantise8(weight)
    np.testing.assert_array_equal(nearest, np.rint(weight / scales[:, None]))
    for nothing in (np.zeros((16, 16)), np.full((16, 16), np.nan), np.eye(16)):
        table, same = quantise8(weight, nothing)
        np.testing.assert_array_equal(table, nearest)
        np.testing.assert_array_equal(same, scales)


def test_one_input_that_is_never_used() -> None:
    x = inputs(1, 16, 100)
    x[:, 4] = 0
    table, _ = quantise8(np.random.default_rng(1).standard_normal((5, 16), np.float32), moments_of(x))
    assert np.abs(table.astype(int)).max() == 127


def test_moments_are_of_what_the_layers_read(plain: TargetBundle) -> None:
    """In one lot or one by one; a layer that reads the residual stream reads vectors of length sqrt(width)."""
    together, apart = InputMoments(plain, TEXTS), InputMoments(plain, TEXTS, most_bytes=1)
    tokens = sum(map(len, TEXTS))
    for name in ("layers.0.self_attn.qkv", "layers.1.mlp.down_proj", "layers.2.mlp.gate_up", "lm_head"):
        moments, again = together.of(name), apart.of(name)
        assert moments is not None and again is not None
        np.testing.assert_array_equal(moments, again)
        np.testing.assert_array_equal(moments, moments.T)
    stream = together.of("layers.2.mlp.gate_up")
    assert stream is not None
    np.testing.assert_allclose(stream.trace(), tokens * plain.config.hidden_size, rtol=0.01)


def test_texts_are_read_once(plain: TargetBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many lots there are, no node runs twice."""
    read = list[str]()

    def opened(path: str) -> onnxruntime.InferenceSession:
        read.extend(node.output[0] for node in onnx.load(path, load_external_data=False).graph.node)
        return open_session(path)

    monkeypatch.setattr("outrider_core.targets.calibration.open_session", opened)
    moments = InputMoments(plain, TEXTS, most_bytes=1)
    for name in ("layers.0.self_attn.qkv", "layers.0.mlp.down_proj", "layers.2.self_attn.o_proj", "lm_head"):
        assert moments.of(name) is not None
    whole = [node.output[0] for node in onnx.load(plain.graph, load_external_data=False).graph.node]
    assert read == whole[: len(read)] and len(read) > 0.9 * len(whole)


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(1, 200))
def test_a_triangle_is_inverted(seed: int, size: int) -> None:
    x = inputs(seed, size, 2 * size)
    upper = np.linalg.cholesky(moments_of(x) + np.eye(size)).T
    inverse = _inverse(upper)
    np.testing.assert_array_equal(inverse, np.triu(inverse))
    np.testing.assert_allclose(inverse @ upper, np.eye(size), atol=1e-9)


def test_layers_that_are_too_wide_have_none(plain: TargetBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_core.targets.calibration.MOST_INPUTS", plain.config.hidden_size)
    moments = InputMoments(plain, TEXTS)
    assert moments.of("layers.1.mlp.down_proj") is None and moments.of("layers.1.mlp.gate_up") is not None


def test_the_target_answers_every_prompt(plain: TargetBundle) -> None:
    told = list[int]()
    texts = write_texts(plain, lambda token, tokens: told.append(token))
    assert told == [*range(len(told))] and 0 < len(told) <= ANSWER_TOKENS and len(texts) == len(PROMPTS)
    assert all(len(text) < plain.max_positions for text in texts)
    assert texts == write_texts(plain)


def test_a_calibrated_copy_is_nearer_to_the_model(tmp_path: Path) -> None:
    """Also where the tokenizer has no chat template, and answers run into the longest sequence."""
    model = tiny_model(hidden=64, layers=3, dtype=torch.float32)
    plain = lowered(model, tmp_path)
    for path in (tmp_path / "source").glob("chat_template*"):
        path.unlink()
    source = TargetSource("tiny", tmp_path / "source")
    calibrated = make_target_bundle(source, tmp_path / "calibrated", 40, calibrate=True)
    with torch.inference_mode():
        wanted = model(torch.tensor([TEXTS[1][:32]])).logits[0].numpy()

    def far(bundle: TargetBundle) -> float:
        first, *rest = TEXTS[1][:32]
        tree = TokenTree(tuple(rest), tuple(range(-1, len(rest) - 1)))
        runner = OnnxRunner.of(bundle, 64, 1)
        return float(np.square(runner.forward([Part(0, 0, (first,), tree)]) - wanted).mean())

    assert far(calibrated) < far(plain)
