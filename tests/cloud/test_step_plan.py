"""A step as one table of fixed shape: the same results as session by session, by the same operations for any number."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import structlog
import torch
import torch._dynamo.exc
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.host_time import Operations
from cloud.torch_engine.compiled import COMPILED_ROWS
from cloud.torch_engine.drawing import draw_on_device
from cloud.torch_engine.kvstore import KVStore
from cloud.torch_engine.loop import attend_spans, span_plan
from cloud.torch_engine.plan import NEW, ROWS, attend_pool, intervals, pool_plan, step_table
from cloud.torch_engine.runner import Steps, TorchRunner, compiled_rows, padded_rows
from outrider_core.models.target import head_dim_of
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Verdict
from outrider_core.targets.part import Part
from tests.cloud.drive import expected_path, make_verifier, random_tree, started
from tests.device import DEVICE
from tests.tiny import plain_decode, tiny_model, tiny_target
from tests.waiting import HANG

pytestmark = pytest.mark.gpu

POOL = 1024
#: numbers up to 4, summed in another order in float32: their last bits are 1.2e-7 to 2.4e-7, and 1.2e-6 was seen
CLOSE = 2e-6
needs_compiler = pytest.mark.skipif(
    DEVICE.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a compiler"
)


def some_parts(seed: int) -> list[Part]:
    """Up to eight sessions somewhere in the pool: prompts, single tokens, trees behind chains."""
    rng = random.Random(seed)
    parts = []
    for base in rng.sample(range(0, POOL, 128), rng.randrange(1, 9)):
        past, chain = rng.choice([0, 0, 1, 60, 70]), rng.choice([1, 1, 2, 17, 30])
        tree = random_tree(rng, range(10, 20), 199) if rng.random() < 0.6 else TokenTree()
        parts.append(Part(base, past, tuple(rng.randrange(199) for _ in range(chain)), tree))
    return parts


def make_runner(steps: Steps, **shape: Any) -> TorchRunner:
    target = tiny_target(tiny_model(dtype=torch.float32, head_dim=16, **shape))  # on a GPU 16 is the least
    config = target.config
    return TorchRunner(target.model, POOL, config.num_key_value_heads, head_dim_of(config), steps)


def of_64_rows(count: int) -> list[list[Part]]:
    """Steps that fill more than half of 64 rows, with different numbers of sessions."""
    every = (some_parts(seed) for seed in range(1000))
    steps = list(islice((parts for parts in every if 32 < sum(map(len, parts)) <= 64), count))
    assert len(steps) == count and len(set(map(len, steps))) > 2
    return steps


@given(st.integers(0, 10**9))
@settings(max_examples=60)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, CLOSE), (torch.float64, 1e-14)])
def test_one_call_attends_as_session_by_session(dtype: torch.dtype, tolerance: float, seed: int) -> None:
    parts = some_parts(seed)
    rows = padded_rows(sum(map(len, parts)))
    compare(
        parts,
        rows,
        seed,
        dtype,
        tolerance,
        lambda store, table, window, *rest: attend_pool(pool_plan(store, table, False, window), 0, *rest),
    )


@needs_compiler
@pytest.mark.slow
def test_the_compiled_call_attends_as_session_by_session() -> None:
    @torch.compile(fullgraph=True, dynamic=False)
    def attend(store: KVStore, table: Tensor, window: int, *rest: Any) -> Tensor:
        return attend_pool(pool_plan(store, table, True, window), 0, *rest)

    for seed, parts in enumerate(of_64_rows(8)):
        compare(parts, 64, seed, torch.float32, CLOSE, attend)


def compare(
    parts: Sequence[Part], rows: int, seed: int, dtype: torch.dtype, tolerance: float, attend: Callable[..., Tensor]
) -> None:
    """`attend` gives what attention session by session gives, and writes the same rows of the pool.

    In layers with a sliding window too, if the model has any.
    """
    tokens, window = sum(map(len, parts)), (0, 3, 20)[seed % 3]
    torch.manual_seed(seed)
    heads, kv_heads, size = 4, 2, 16
    stores = [KVStore(1, POOL, kv_heads, size, dtype, DEVICE) for _ in range(2)]
    for pair in zip(*((*store.keys, *store.values) for store in stores), strict=True):
        pair[0].normal_()
        pair[1].copy_(pair[0])
    query = torch.randn(1, heads, rows, size, dtype=dtype, device=DEVICE)
    new = torch.randn(2, rows, kv_heads, size, dtype=dtype, device=DEVICE)
    table = torch.from_numpy(step_table(parts, rows, stores[0].spare)).to(DEVICE)
    spans = span_plan(stores[0], parts, table[ROWS], heads // kv_heads, window)
    for windowed in (False, True):
        want = attend_spans(spans, 0, query, *new, 0.25, windowed)[0, :tokens]
        got = attend(stores[1], table, window, query, *new, 0.25, windowed)[0, :tokens]
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    for part in parts:
        extent = slice(part.base, part.base + part.past + len(part))
        assert torch.equal(stores[0].keys[0][extent], stores[1].keys[0][extent])
        assert torch.equal(stores[0].values[0][extent], stores[1].values[0][extent])


@given(st.integers(0, 10**9), st.integers(1, 5))
def test_intervals_are_ancestors(seed: int, chain: int) -> None:
    tree = random_tree(random.Random(seed), range(10, 20), 199, max_nodes=30)
    enter, leave = intervals(chain, tree)
    above = (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None])  # [row, whether it sees that row]
    want = np.tri(chain + len(tree), dtype=bool)
    for node, bits in enumerate(tree.ancestor_bits()):
        want[chain + node, chain:] = [bool(bits >> other & 1) for other in range(len(tree))]
    assert (above == want).all()


def test_a_table_fits_any_number_of_sessions() -> None:
    """Tiles and blocks of 1024 sessions with one token each, and of one with 1024: no more tiles than rows."""
    one = [Part(0, 5, tuple(range(1024)), TokenTree())]
    many = [Part(128 * index, 5, (1,), TokenTree()) for index in range(1024)]
    tables = [step_table(parts, 1024, 200_000) for parts in (one, many)]
    assert tables[0].shape == tables[1].shape
    assert (tables[1][NEW] == 128 * np.arange(1024) + 5).all()
    assert [compiled_rows(tokens) for tokens in (1, 8, 9, 513, 1024, 1025)] == [8, 8, 16, 768, 1024, 2048]


SAMPLED = [Sampling(1.0, 5, 0.9, 0.1, 3), Sampling(0.7, seed=4), Sampling(1.3, top_p=0.5, seed=5)]


def operations(runner: TorchRunner, sessions: int) -> int:
    """Of a whole step of 64 tokens: forward, draws, compaction, and the rows that features are made of."""
    each = 64 // sessions
    parts = [Part(16 * index, 3, (5,), TokenTree.chain(range(each - 1))) for index in range(sessions)]
    with Operations() as seen:
        logits = runner.forward(parts)
        draw_on_device(logits.values, [SAMPLED[index % 3] for index in range(64)], range(64))
        runner.move(range(10, 10 + sessions), range(9, 9 + sessions))
        runner.gather([0, 1], range(64))
    return seen.count


def test_operations_of_a_step_do_not_depend_on_the_number_of_sessions() -> None:
    runner = make_runner("pool", layers=3)
    counts = [operations(runner, sessions) for sessions in (1, 8, 64)]
    assert counts[0] == counts[1] == counts[2], counts
    loop = make_runner("loop", layers=3)
    assert operations(loop, 64) > operations(loop, 1) + 100  # what is counted would show it


@needs_compiler
@pytest.mark.slow
def test_a_compiled_step_is_one_graph_and_one_for_all_steps_of_its_size() -> None:
    runners: Sequence[TorchRunner] = [make_runner("compiled"), make_runner("loop")]
    runners[0].warm_up([64])
    with torch.compiler.set_stance("fail_on_recompile"):
        for parts in of_64_rows(12):
            got, want = (runner.forward(parts).values for runner in runners)
            torch.testing.assert_close(got, want, rtol=0, atol=5e-6 * float(want.abs().max()))
            for part in parts:
                extent = slice(part.base + part.past, part.base + part.past + len(part))
                for one, other in zip(runners[0].store.keys, runners[1].store.keys, strict=True):
                    torch.testing.assert_close(one[extent], other[extent], rtol=0, atol=5e-6 * float(other.abs().max()))
        # and in steps of one size a session's logits are the same bits whoever shares them
        company = [Part(128 * index, 9, (index,), TokenTree()) for index in range(1, 7)]
        session = Part(0, 20, tuple(range(30)), TokenTree((7, 8, 9), (-1, 0, 0)))
        alone, first, last = (
            runners[0].forward(parts).values for parts in ([session], [session, *company], [*company, session])
        )
        assert torch.equal(first[:4], alone) and torch.equal(last[-4:], alone)
    assert runners[0].steps == "compiled"


def test_a_model_that_cannot_be_compiled_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, loop = make_runner("compiled"), make_runner("loop")
    parts = some_parts(1)

    def fail(*_: object) -> None:
        raise torch._dynamo.exc.Unsupported("a graph break\nand more")

    monkeypatch.setattr(runner, "_compiled", fail)
    with structlog.testing.capture_logs() as logs:
        runner.warm_up()
    assert [(each["event"], each["why"]) for each in logs] == [("steps are not compiled", "a graph break")]
    assert torch.equal(runner.forward(parts).values, loop.forward(parts).values)


@pytest.mark.parametrize("rows", [20, 200, 4000])
def test_compiled_steps_that_give_other_logits_are_not_served(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows is compared with the loop, before the first session."""
    runner, loop = make_runner("compiled"), make_runner("loop")
    runner.store = KVStore(2, rows, 2, 16, torch.float32, DEVICE)
    pool, seen = make_runner("pool"), list[int]()

    def compiled(table: Any) -> Tensor:
        seen.append(table.shape[1])
        pool.store = runner.store
        return pool._pool_step(torch.from_numpy(table).to(DEVICE)).roll(int(table.shape[1] == 64), 0)

    monkeypatch.setattr(runner, "_compiled", compiled)
    sizes = [size for size in COMPILED_ROWS if size != 64]
    with structlog.testing.capture_logs() as logs:
        runner.warm_up(sizes)
        assert (runner.steps, seen, logs) == ("compiled", sorted(2 * sizes), [])
        assert not any(tensor.any() for tensor in (*runner.store.keys, *runner.store.values))
        runner.warm_up([8, 64, 128])
    assert runner.steps == "loop" and seen[-4:] == [8, 8, 64, 64]
    [line] = logs
    assert "64 rows" in line["why"]
    part = Part(0, 0, (5, 6, 7), TokenTree.chain([8, 9]))
    torch.testing.assert_close(runner.forward([part]).values, loop.forward([part]).values)


@needs_compiler
@pytest.mark.slow
def test_compiled_steps_decode_as_plain_decoding_does() -> None:
    model = tiny_model("qwen3", seed=7, dtype=torch.float32, head_dim=16)
    rng = random.Random(4)
    verifier = make_verifier(model, (), steps="compiled")
    runner: Any = verifier.engine.runner
    runner.warm_up([8, 16, 32, 64])
    with started(verifier) as direct, torch.compiler.set_stance("fail_on_recompile"):
        talks = []
        for sampling in (Sampling(), Sampling(0.7, seed=1), Sampling(1.0, top_p=0.9, seed=3)):
            prompt = [rng.randrange(4, 199) for _ in range(rng.choice([2, 20, 40]))]
            truth = plain_decode(model, prompt, sampling, 40, eos_ids=())
            session = os.urandom(16)
            direct.open(session, prompt, 0, sampling)
            talks.append((session, prompt, truth, [0]))
        for seq in range(1, 9):
            waiting = []
            for session, prompt, truth, done in talks:
                tree = random_tree(rng, truth[done[0] :], 199, max_nodes=6)
                waiting.append((tree, direct.verify(session, seq, len(prompt) + done[0], tree)))
            for (_, _, truth, done), (tree, replies) in zip(talks, waiting, strict=True):
                verdict = replies.get(timeout=HANG)
                assert isinstance(verdict, Verdict), verdict
                assert list(verdict.accepted) == expected_path(tree, truth[done[0] :])
                done[0] += len(verdict.accepted) + 1
                assert verdict.bonus == truth[done[0] - 1]
    assert runner.steps == "compiled"
