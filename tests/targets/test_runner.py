"""The runner's three calls: what a step computes, and how rows move, wherever sessions lie in the pool."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets import batch
from outrider_core.targets import runner as module
from outrider_core.targets.batch import Batch, group_parts
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.graph import TargetGraph
from outrider_core.targets.memory import untouched
from outrider_core.targets.part import POOL_BLOCK, Part
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.tables import TableFile
from outrider_core.targets.weights import folder_weights
from tests.tiny import tiny_model

PROMPT = [5, 9, 60, 61, 8, 100, 7]
TREE = TokenTree((10, 11, 12, 13), (ROOT, 0, 0, ROOT))


@pytest.fixture(scope="module")
def model() -> object:
    return tiny_model(hidden=64, dtype=torch.float32)


def lower(model: Any, folder: Path, blocks: int = 8) -> OnnxRunner:
    model.save_pretrained(folder)
    weights, config = folder_weights(folder)
    with TableFile(folder) as tables:
        graph = TargetGraph(config, weights, 512, tables)
        onnx.save(graph.build(), folder / "target.onnx")
    scales = [graph.value_scale(layer) for layer in range(config.num_hidden_layers)]
    return OnnxRunner(folder / "target.onnx", config, scales, blocks * POOL_BLOCK, threads=1)


@pytest.fixture
def runner(model: object, tmp_path: Path) -> OnnxRunner:
    return lower(model, tmp_path)


@pytest.fixture(scope="module", params=[("llama", 4, 2), ("mistral-local", 4, 4), ("qwen3", 6, 1)], ids=str)
def crowded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnnxRunner:
    """With many query heads to a key head, and with one."""
    family, heads, kv_heads = request.param
    model = tiny_model(family, heads=heads, kv_heads=kv_heads, hidden=48 if heads == 6 else 64, dtype=torch.float32)
    return lower(model, tmp_path_factory.mktemp("crowded"), blocks=24)


def test_a_session_is_the_same_anywhere_and_beside_others(runner: OnnxRunner) -> None:
    alone = [runner.forward([Part(0, at, (token,))])[0] for at, token in enumerate(PROMPT)]
    first, second, third = 2 * POOL_BLOCK, 5 * POOL_BLOCK, 7 * POOL_BLOCK
    runner.forward([Part(third, 0, tuple(PROMPT[:3]), wanted=False)])
    together = runner.forward(
        [Part(first, 0, tuple(PROMPT[:3]), wanted=False), Part(second, 0, tuple(PROMPT), TREE), Part(third, 3, (61,))]
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


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[int, int, Part]]:
    """(seed of a prefix, its length, what comes next) of sessions in extents of any size, with gaps between them."""
    found, block = [], 0
    while block < 24 and len(found) < 6:
        block += draw(st.integers(0, 2))
        past = draw(st.integers(0, 150))
        chain = draw(st.lists(st.integers(4, 198), min_size=1, max_size=draw(st.sampled_from([1, 1, 4, 20]))))
        size = draw(st.integers(0, 9))
        tokens = draw(st.lists(st.integers(4, 198), min_size=size, max_size=size, unique=True))
        parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
        tree = TokenTree(tuple(tokens), tuple(ROOT if parent < 0 else parent for parent in parents))
        part = Part(block * POOL_BLOCK, past, tuple(chain), tree, draw(st.integers(0, 3)) > 0)
        end = block + -(-(past + len(part)) // POOL_BLOCK)
        if end > 24:
            break
        found.append((draw(st.integers(0, 9)), past, part))
        block = end
    return draw(st.permutations(found))


@settings(max_examples=40)
@given(drawn=sessions(), idle_blocks=st.integers(0, 4))
def test_parts_in_one_run_have_the_bits_they_have_alone(
    crowded: OnnxRunner, drawn: list[tuple[int, int, Part]], idle_blocks: int
) -> None:
    def prefill() -> None:
        for seed, past, part in drawn:
            prefix = np.random.default_rng(seed).integers(4, 199, past).tolist()
            if past:
                crowded.forward([Part(part.base, 0, tuple(prefix), wanted=False)])

    parts = [part for _, _, part in drawn]
    rows = [row for part in parts for row in range(part.base, part.base + part.past + len(part))]
    prefill()
    alone = [crowded.forward([part]) for part in parts]
    stored = crowded.gather([0, 1], rows)
    prefill()
    crowded._idle_blocks = idle_blocks
    together = crowded.forward(parts) if parts else np.empty((0, 199))
    np.testing.assert_array_equal(together, np.concatenate([np.empty((0, 199)), *alone]))
    np.testing.assert_array_equal(crowded.gather([0, 1], rows), stored)


def test_what_is_not_a_number_stays_with_its_session(crowded: OnnxRunner) -> None:
    """In a part of the run, and in a block between two parts that is nobody's."""
    parts = [Part(block * POOL_BLOCK, 3, (9,)) for block in (0, 2, 3)]
    for part in parts:
        crowded.forward([Part(part.base, 0, (5, 6, 7), wanted=False)])
    alone = crowded.forward([parts[0]])[0]
    crowded._idle_blocks = 2
    assert group_parts(parts, 2) == [[0, 1, 2]]
    for pool in (crowded._keys, crowded._values):
        pool[:, 1] = np.nan
        pool[:, 2, :, 1] = np.nan
    found = crowded.forward(parts)
    np.testing.assert_array_equal(found[0], alone)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[2], alone)
    for pool in (crowded._keys, crowded._values):
        pool[:] = 0


def test_what_runs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours do; not those far apart, of very different length, or too many."""
    monkeypatch.setattr(batch, "JOINED_TOKENS", 30)

    def part(block: int, tokens: int, past: int = 0) -> Part:
        return Part(block * POOL_BLOCK, past, tuple(range(5, 5 + tokens)))

    assert group_parts([part(2, 1), part(0, 1), part(1, 1)], 0) == [[1, 2, 0]]
    assert group_parts([part(0, 1), part(3, 1)], 1) == [[0], [1]]
    assert group_parts([part(0, 1), part(3, 1)], 2) == [[0, 1]]
    assert group_parts([part(0, 1, 200), part(4, 9), part(5, 9)], 9) == [[0], [1, 2]]
    assert group_parts([part(block, 12) for block in range(4)], 9) == [[0, 1], [2, 3]]


def test_a_long_chain_runs_in_pieces(model: object, tmp_path: Path) -> None:
    """The logits behind it, those of a tree below it and its keys have the bits of single steps."""
    runner = lower(model, tmp_path, blocks=16)
    chain, tree, other = [5 + at % 150 for at in range(300)], TokenTree.chain([9, 10]), 8 * POOL_BLOCK
    single = [runner.forward([Part(0, at, (token,))]) for at, token in enumerate([*chain, 9, 10])]
    beside = Part(other, 0, (7, 8))
    together = runner.forward([Part(0, 0, tuple(chain), tree), beside])
    np.testing.assert_array_equal(together[:3], np.concatenate(single[299:]))
    np.testing.assert_array_equal(together[3:], runner.forward([beside]))
    keys = runner.gather([0, 1], range(302))
    for at, token in enumerate([*chain, 9, 10]):
        runner.forward([Part(0, at, (token,))])
    np.testing.assert_array_equal(runner.gather([0, 1], range(302)), keys)


def test_memory_of_a_large_run_is_given_back(runner: OnnxRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some small runs, once; it is taken again as if nothing had been."""
    given = list[int]()
    monkeypatch.setattr(module, "give_back", lambda: given.append(1))
    first = runner.forward([Part(0, 0, tuple(range(5, 45)))])
    for _ in range(3 * module.SMALL_RUNS):
        runner.forward([Part(POOL_BLOCK, 0, (9,))])
    assert given == [1]
    np.testing.assert_array_equal(runner.forward([Part(0, 0, tuple(range(5, 45)))]), first)


def test_a_pool_takes_memory_only_where_it_is_written() -> None:
    import psutil

    process, before = psutil.Process(), psutil.Process().memory_info().rss
    pool = untouched((64, 1 << 20))  # 256 MiB
    pool[:, 0] = 1
    assert process.memory_info().rss - before < 16 << 20 and pool.sum() == 64


KEPT_BY_A_THREAD = """
import threading
import psutil
from outrider_core.targets.memory import give_back, return_large_blocks

def work():
    bytearray(30 << 20)  # once this is freed, glibc would take smaller blocks from the thread's heap
    [bytearray(9 << 20) for _ in range(4)]

return_large_blocks()
before = psutil.Process().memory_info().rss
done, let = threading.Event(), threading.Event()
threading.Thread(target=lambda: (work(), done.set(), let.wait())).start()
done.wait()
give_back()
print(psutil.Process().memory_info().rss - before)
let.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_large_blocks_of_a_thread_are_given_back() -> None:
    found = subprocess.run([sys.executable, "-c", KEPT_BY_A_THREAD], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 8 << 20


@settings(max_examples=25)
@given(parts=sessions(), window=st.integers(1, 200))
def test_a_window_hides_what_lies_further_back(parts: list[tuple[int, int, Part]], window: int) -> None:
    """By positions, of nodes too, whose rows lie elsewhere."""
    values = {**tiny_model(dtype=torch.float32).config.to_dict(), "model_type": "mistral", "sliding_window": window}
    config = TargetConfig.from_json(values)
    for _, _, part in parts:
        feeds = Batch([part], config).feeds
        size, chain = part.past + len(part), part.past + len(part.chain)
        positions = [*range(chain), *(chain - 1 + depth for depth in part.tree.depths)]
        seen, near = (
            np.isfinite(feeds[name]).transpose(1, 2, 0, 3).reshape(config.group, len(part), -1)[:, :, :size]
            for name in ("mask", "window_mask")
        )
        distance = np.array(positions)[part.past :, None] - np.array(positions)
        np.testing.assert_array_equal(near, seen & (distance < window))
