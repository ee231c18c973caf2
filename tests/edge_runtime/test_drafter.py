"""The drafter's tree and cache, against an engine whose logits show exactly what each query could see."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.drafter import Drafter, TreeShape
from edge_runtime.engines.onnx import Floats, Ints
from edge_runtime.lookup import HIT_RATES, LONGEST, Lookup
from protocol.noise import gumbel_noise
from protocol.rows import RowShape
from protocol.sampling import Sampling, draw
from protocol.tree import ROOT

VOCAB = 40
DRAFT_IDS = np.array(sorted(random.Random(0).sample(range(VOCAB), 24)), np.int64)
GREEDY = Sampling()
MAX_CONTEXT = 200


def logits_of(sequence: tuple[int, ...], row_count: int) -> Floats:
    """A fixed random law for every visible sequence and number of feature rows."""
    rng = np.random.default_rng([len(sequence), row_count, *sequence])
    return (2.5 * rng.standard_normal(len(DRAFT_IDS))).astype(np.float32)


class TransparentEngine:
    """Keys carry token id and position; logits are `logits_of` what mask and cache let a query see."""

    def __init__(self) -> None:
        self.fed: list[int] = []

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        rows: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        self.fed += tokens.tolist()
        keys = np.zeros((len(tokens), *sa_keys.shape[1:]), np.float32)
        keys[:, 0, 0], keys[:, 0, 1] = tokens, positions
        every = np.concatenate([sa_keys, keys])
        assert sa_mask.shape == (len(tokens), len(every)) and sa_mask.dtype == np.float32
        logits = []
        for query in wanted:
            seen = every[sa_mask[query] == 0.0][:, 0]
            assert seen[:, 1].tolist() == list(range(len(seen))), "positions have gaps or repeats"
            logits.append(logits_of(tuple(int(token) for token in seen[:, 0]), len(rows)))
        return np.array(logits), keys, keys


def make_drafter(lookup: bool = False) -> Drafter:
    return Drafter(TransparentEngine(), DRAFT_IDS, RowShape(1, 2), 1, MAX_CONTEXT, lookup)


def log_q(sequence: list[int], sampling: Sampling) -> np.ndarray:
    x = logits_of(tuple(sequence), 0).astype(np.float64)
    if not sampling.greedy:
        x = x / sampling.temperature
        x = x - np.log(np.exp(x).sum()) + gumbel_noise(sampling.seed, len(sequence), VOCAB)[DRAFT_IDS]
    return x - np.log(np.exp(x).sum())


def reference_tree(prefix: list[int], sampling: Sampling, shape: TreeShape) -> set[tuple[int, ...]]:
    """EAGLE-2's tree from its description: expand the best of each level, then keep the best of all."""
    pool: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(shape.depth):
        level: dict[tuple[int, ...], float] = {}
        for path, score in frontier:
            law = log_q(prefix + list(path), sampling)
            for column in np.argsort(-law)[: shape.breadth]:
                level[(*path, int(DRAFT_IDS[column]))] = score + law[column]
        pool |= level
        frontier = sorted(level.items(), key=lambda item: -item[1])[: shape.breadth]
    return {path for path, _ in sorted(pool.items(), key=lambda item: -item[1])[: shape.nodes]}


prefixes = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=90)
samplings = st.one_of(
    st.just(GREEDY), st.builds(Sampling, temperature=st.sampled_from([0.5, 1.0]), seed=st.integers(0, 99))
)
shapes = st.builds(TreeShape, nodes=st.integers(1, 40), depth=st.integers(1, 5), breadth=st.integers(1, 6))


@settings(max_examples=60, deadline=None)
@given(prefixes, samplings, shapes)
def test_tree_is_the_one_eagle_2_describes(prefix: list[int], sampling: Sampling, shape: TreeShape) -> None:
    tree = make_drafter().grow(prefix, sampling, shape)
    paths = {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}
    assert paths == reference_tree(prefix, sampling, shape)


@settings(max_examples=40, deadline=None)
@given(prefixes, st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, VOCAB - 1), max_size=4)), max_size=5))
def test_cache_reuse_never_shows(prefix: list[int], edits: list[tuple[int, list[int]]]) -> None:
    """Extending, shortening and replacing the text gives the tree a fresh drafter would grow."""
    drafter, shape = make_drafter(), TreeShape(12, 3, 4)
    for drop, extra in edits:
        drafter.grow(prefix, GREEDY, shape)
        prefix = [*prefix[: max(1, len(prefix) - drop)], *extra]
        assert drafter.grow(prefix, GREEDY, shape) == make_drafter().grow(prefix, GREEDY, shape)
        assert drafter.write(prefix, GREEDY) == make_drafter().write(prefix, GREEDY)


def test_only_new_tokens_are_fed() -> None:
    engine = TransparentEngine()
    drafter = Drafter(engine, DRAFT_IDS, RowShape(1, 2), 1, MAX_CONTEXT, False)
    drafter.write(list(range(10)), GREEDY)
    engine.fed.clear()
    drafter.write([*range(10), 11, 12], GREEDY)
    assert engine.fed == [11, 12]


def test_written_tokens_are_the_laws_own_draw() -> None:
    prefix = [1, 2, 3]
    drafter = make_drafter()
    assert drafter.write(prefix, GREEDY) == DRAFT_IDS[np.argmax(logits_of((1, 2, 3), 0))]
    full = np.full(VOCAB, -np.inf)
    full[DRAFT_IDS] = logits_of((1, 2, 3), 0)
    for seed in range(20):
        sampling = Sampling(temperature=0.8, seed=seed)
        assert drafter.write(prefix, sampling) == draw(full, sampling, len(prefix))


def test_shared_noise_puts_the_targets_draw_first() -> None:
    """Where drafter and target agree on the law, the target's seeded draw is always the first child."""
    prefix = [5, 6]
    full = np.full(VOCAB, -np.inf)
    full[DRAFT_IDS] = logits_of((5, 6), 0)
    for seed in range(20):
        sampling = Sampling(temperature=1.0, seed=seed)
        tree = make_drafter().grow(prefix, sampling, TreeShape(1, 1, 1))
        assert tree.tokens == (draw(full, sampling, len(prefix)),)


def test_lookup_adds_what_followed_last_time_even_outside_the_draft_vocabulary() -> None:
    outside = next(token for token in range(VOCAB) if token not in DRAFT_IDS)
    prefix = [30, 31, 32, 33, outside, 34, 35, 30, 31, 32, 33]
    tree = make_drafter(lookup=True).grow(prefix, GREEDY, TreeShape(6, 3, 2))
    assert tree.child(ROOT, outside) is not None
    assert (outside, 34, 35) in [path[:3] for path in tree.paths()]
    assert all(outside != token for token in make_drafter().grow(prefix, GREEDY, TreeShape(6, 3, 2)).tokens)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), samplings)
def test_mixed_law_is_a_law_and_sums_to_one(prefix: list[int], sampling: Sampling) -> None:
    """With every candidate kept, the children of the root carry all the probability, lookup or not."""
    drafter = make_drafter(lookup=True)
    tokens: list[int] = []
    scores: list[float] = []
    assert drafter.lookup is not None
    drafter.lookup.follow(prefix)
    drafter._propose([ROOT], drafter._advance(prefix)[None], len(prefix), sampling, 10**6, tokens, [], scores)
    guess = drafter.lookup.guess([])
    inside = guess is None or guess[0] in DRAFT_IDS
    assert len(set(tokens)) == len(tokens) == len(DRAFT_IDS)
    assert np.exp(scores).sum() == pytest.approx(1.0, abs=1e-9) or not inside


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=4), st.lists(st.integers(0, 3), max_size=3))
def test_lookup_equals_a_search_through_the_text(texts: list[list[int]], path: list[int]) -> None:
    lookup = Lookup()
    text: list[int] = []
    for number, more in enumerate(texts):
        text = text + more if number % 3 else list(more)  # grows, or is another text
        lookup.follow(text)
    tail = (text + path)[-LONGEST:] if text or path else []
    expected = None
    for length in range(len(tail), 0, -1):
        run = tail[-length:]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == run]
        if ends:
            expected = (text[ends[-1]], HIT_RATES[length - 1])
            break
    assert lookup.guess(path) == expected


def test_rows_are_kept_up_to_a_length() -> None:
    drafter = make_drafter()
    without = drafter.write([1], GREEDY)
    drafter.add_rows(np.arange(3), np.ones((3, 2, 1, 2), np.float32))
    assert len(drafter.visible_rows()) == 3
    drafter.keep_rows(2)
    assert len(drafter.visible_rows()) == 2
    drafter.keep_rows(0)
    assert len(drafter.visible_rows()) == 0 and drafter.write([1], GREEDY) == without


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(12)), st.integers(0, 12))
def test_visible_rows_are_the_newest_without_a_gap(order: list[int], count: int) -> None:
    drafter = make_drafter()
    there = order[:count]
    for position in there:
        drafter.add_rows(np.array([position]), np.full((1, 2, 1, 2), position, np.float32))
    expected = []
    if there:
        position = max(there)
        while position in there:
            expected.insert(0, position)
            position -= 1
    assert drafter.visible_rows()[:, 0, 0, 0].tolist() == expected


def test_stop_returns_what_is_there() -> None:
    tree = make_drafter().grow([1, 2], GREEDY, TreeShape(30, 5, 4), stop=lambda: True)
    assert len(tree) == 4 and set(tree.parents) == {ROOT}


def test_a_full_context_gives_no_tree_and_a_nearly_full_one_a_shallow_one() -> None:
    drafter = make_drafter()
    assert len(drafter.grow([1] * MAX_CONTEXT, GREEDY, TreeShape())) == 0
    assert max(drafter.grow([1] * (MAX_CONTEXT - 2), GREEDY, TreeShape()).depths) == 2


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (300, 1, 1), (10, 100, 100)])
def test_impossible_shapes_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"tree|depth"):
        TreeShape(*numbers)
