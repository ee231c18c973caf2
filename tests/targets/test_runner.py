"""The runner's three calls: what a step computes, and how rows move, wherever sessions lie in the pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.graph import POOL_BLOCK, TargetGraph
from outrider_core.targets.part import Part
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.tables import TableFile
from outrider_core.targets.weights import SafetensorsWeights
from tests.tiny import tiny_model

PROMPT = [5, 9, 60, 61, 8, 100, 7]
TREE = TokenTree((10, 11, 12, 13), (ROOT, 0, 0, ROOT))


@pytest.fixture(scope="module")
def model() -> object:
    return tiny_model(hidden=64, dtype=torch.float32)


@pytest.fixture
def runner(model: object, tmp_path: Path) -> OnnxRunner:
    model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    config = TargetConfig.from_json(model.config.to_dict())  # type: ignore[attr-defined]
    with TableFile(tmp_path) as tables:
        graph = TargetGraph(config, SafetensorsWeights(tmp_path), 512, tables)
        onnx.save(graph.build(), tmp_path / "target.onnx")
    exponents = [graph.value_exponent(layer) for layer in range(config.num_hidden_layers)]
    return OnnxRunner(tmp_path / "target.onnx", config, exponents, 8 * POOL_BLOCK, threads=1)


def test_a_session_is_the_same_anywhere_and_beside_others(runner: OnnxRunner) -> None:
    alone = [runner.forward([Part(0, at, (token,))])[0] for at, token in enumerate(PROMPT)]
    first, second = 2 * POOL_BLOCK, 5 * POOL_BLOCK
    together = runner.forward(
        [Part(first, 0, tuple(PROMPT[:3]), wanted=False), Part(second, 0, tuple(PROMPT), TREE), Part(first, 3, (61,))]
    )
    assert together.shape == (1 + 4 + 1, 199)
    np.testing.assert_array_equal(together[0], alone[-1])
    np.testing.assert_array_equal(together[-1], alone[3])
    for node, path in enumerate(((10,), (10, 11), (10, 12), (13,))):
        chained = runner.forward([Part(0, len(PROMPT), path)])[0]
        np.testing.assert_array_equal(together[1 + node], chained)


def test_accepted_nodes_move_behind_the_prefix(runner: OnnxRunner) -> None:
    size = len(PROMPT)
    runner.forward([Part(0, 0, tuple(PROMPT), TREE)])
    runner.move([size + 2], [size + 1])  # the path 10, 12; node 0 is in its place
    after = runner.forward([Part(0, size + 2, (50,))])
    other = 4 * POOL_BLOCK
    runner.forward([Part(other, 0, (*PROMPT, 10, 12))])
    np.testing.assert_array_equal(after, runner.forward([Part(other, size + 2, (50,))]))
    runner.move(range(other, other + size + 2), range(other + 1, other + size + 3))  # overlapping
    moved = runner.gather([0, 1], range(other + 1, other + size + 3))
    np.testing.assert_array_equal(moved, runner.gather([0, 1], range(size + 2)))


def test_rows_are_the_models_keys_and_values(runner: OnnxRunner, model: object) -> None:
    runner.forward([Part(POOL_BLOCK, 0, tuple(PROMPT))])
    rows = runner.gather([1, 0], range(POOL_BLOCK, POOL_BLOCK + len(PROMPT)))
    cache = model(torch.tensor([PROMPT]), use_cache=True).past_key_values  # type: ignore[operator]
    for place, layer in ((0, 1), (1, 0)):
        keys, values = cache.layers[layer].keys[0], cache.layers[layer].values[0]  # [heads, T, width]
        expected = torch.stack([keys, values], 1).permute(2, 0, 1, 3).flatten(1).numpy()
        assert np.corrcoef(rows[:, place].ravel(), expected.ravel())[0, 1] > 0.998
        assert np.abs(rows[:, place] - expected).max() < 0.2 * np.abs(expected).max()
