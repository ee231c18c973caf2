"""The drafter's tree and cache, against an engine whose logits show exactly what each query could see."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider_core.drafting.candidates import CHILDREN, LEAST_CHILDREN, LIKELY_CHILD
from outrider_core.drafting.drafter import MAX_WIDTH, PROMPT_CHUNK, Drafter, TreeShape
from outrider_core.drafting.engines import Floats, Ints
from outrider_core.drafting.growth import Growth
from outrider_core.drafting.lookup import HIT_RATES, Guess, Lookup
from outrider_core.protocol.constraint import GRAMMAR_JSON_OBJECT, Constraint, Disobeyed, Rules, pack_bias
from outrider_core.protocol.noise import gumbel_noise
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling, draw
from outrider_core.protocol.tree import MAX_NODES, ROOT, TokenTree

VOCAB = 40
DRAFT_IDS = np.array(sorted(random.Random(0).sample(range(VOCAB), 24)), np.int64)
GREEDY = Sampling()
MAX_CONTEXT = 200
NULL_ROW = np.array([[[0.25, -0.5]], [[3.0, 4.0]]], np.float32)


def logits_of(sequence: tuple[int, ...], row_count: int) -> Floats:
    """A fixed random distribution for every visible sequence and number of rows that cross-attention reads."""
    rng = np.random.default_rng([len(sequence), row_count, *sequence])
    return (2.5 * rng.standard_normal(len(DRAFT_IDS))).astype(np.float32)


class TransparentEngine:
    """Keys carry token id and position; logits are `logits_of` what mask and cache let a query see."""

    def __init__(self) -> None:
        self.fed: list[int] = []
        self.widths: list[int] = []
        self.read: tuple[Floats, ...] = ()  # the caches and rows of the last step, as they came

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        self.fed += tokens.tolist()
        self.widths.append(len(tokens))
        self.read = sa_keys, sa_values, row_keys, row_values
        assert row_keys.shape == row_values.shape and len(row_keys) >= 1
        assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in self.read)
        keys = np.zeros((len(tokens), *sa_keys.shape[1:]), np.float32)
        keys[:, 0, 0], keys[:, 0, 1] = tokens, positions
        every = np.concatenate([sa_keys, keys])
        assert sa_mask.shape == (len(tokens), len(every)) and sa_mask.dtype == np.float32
        logits = []
        for query in wanted:
            seen = every[sa_mask[query] == 0.0][:, 0]
            assert seen[:, 1].tolist() == list(range(len(seen))), "positions have gaps or repeats"
            logits.append(logits_of(tuple(int(token) for token in seen[:, 0]), len(row_keys)))
        return np.array(logits), keys, keys


def make_drafter(
    lookup: bool = False, null_row: Floats | None = NULL_ROW, engine: TransparentEngine | None = None,
    max_context: int = MAX_CONTEXT, sure: float = 1.0, row_cost: float | None = 0.0,
) -> Drafter:  # fmt: skip
    engine = engine or TransparentEngine()
    return Drafter(engine, DRAFT_IDS, RowShape(1, 2), 1, max_context, lookup, null_row, sure, row_cost)


def log_q(sequence: list[int], sampling: Sampling, sure: float = 1.0) -> np.ndarray:
    """sure: the drafter's confidence_temperature."""
    x = logits_of(tuple(sequence), 1).astype(np.float64)
    if sampling.greedy:
        x = x / sure
    if not sampling.greedy:
        x = x / sampling.temperature
        x = x - np.log(np.exp(x).sum()) + gumbel_noise(sampling.seed, len(sequence), VOCAB)[DRAFT_IDS]
    return x - np.log(np.exp(x).sum())


def reference_tree(prefix: list[int], sampling: Sampling, shape: TreeShape, sure: float = 1.0) -> set[tuple[int, ...]]:
    """The likeliest nodes of all: whoever can still bring one of them is expanded."""
    pool: dict[tuple[int, ...], float] = {}
    todo: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    while todo:
        path, score = todo.pop()
        distribution = log_q(prefix + list(path), sampling, sure)
        for rank, column in enumerate(np.argsort(-distribution)[:CHILDREN]):
            if rank >= LEAST_CHILDREN and distribution[column] <= LIKELY_CHILD:
                break
            child = (*path, int(DRAFT_IDS[column]))
            pool[child] = score + distribution[column]
            better = sum(other > pool[child] for other in pool.values())
            if len(child) < shape.depth and better < shape.nodes:
                todo.append((child, pool[child]))
    return {path for path, _ in sorted(pool.items(), key=lambda item: -item[1])[: shape.nodes]}


prefixes = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=90)
samplings = st.one_of(
    st.just(GREEDY), st.builds(Sampling, temperature=st.sampled_from([0.5, 1.0]), seed=st.integers(0, 99))
)
shapes = st.builds(
    TreeShape, nodes=st.integers(1, 40), depth=st.integers(1, 5), breadth=st.integers(1, 6), gain=st.just(0.0)
)


@settings(max_examples=25, deadline=None)
@given(prefixes, samplings, shapes, st.sampled_from([1.0, 0.6]))
def test_tree_holds_the_likeliest_nodes(prefix: list[int], sampling: Sampling, shape: TreeShape, sure: float) -> None:
    tree = make_drafter(sure=sure).draft(prefix, sampling, shape).tree
    paths = {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}
    assert paths == reference_tree(prefix, sampling, shape, sure)


def test_confidence_is_of_a_greedy_choice() -> None:
    prefix, sure = [1, 2, 3], 0.5
    for sampling, temperature in ((GREEDY, sure), (Sampling(temperature=0.8, seed=1), 0.8)):
        token, probability = make_drafter(sure=sure).next_token(prefix, sampling)
        x = logits_of((1, 2, 3), 1).astype(np.float64) / temperature
        wanted = np.exp(x - np.log(np.exp(x).sum()))[DRAFT_IDS.tolist().index(token)]
        assert probability == pytest.approx(wanted)
    assert make_drafter(sure=sure).next_token(prefix, GREEDY)[0] == make_drafter().next_token(prefix, GREEDY)[0]


@settings(max_examples=40, deadline=None)
@given(prefixes, st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, VOCAB - 1), max_size=4)), max_size=5))
def test_cache_reuse_never_shows(prefix: list[int], edits: list[tuple[int, list[int]]]) -> None:
    """Extending, shortening and replacing the text gives the tree a fresh drafter would grow."""
    drafter, shape = make_drafter(), TreeShape(12, 3, 4, 0.0)
    for drop, extra in edits:
        drafter.draft(prefix, GREEDY, shape)
        prefix = [*prefix[: max(1, len(prefix) - drop)], *extra]
        assert drafter.draft(prefix, GREEDY, shape).tree == make_drafter().draft(prefix, GREEDY, shape).tree
        assert drafter.next_token(prefix, GREEDY)[0] == make_drafter().next_token(prefix, GREEDY)[0]


class Allow:
    """A grammar that allows these tokens wherever it is."""

    error = ""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def allowed(self) -> NDArray[np.uint32]:
        bits = np.zeros(-(-VOCAB // 32), np.uint32)
        for token in self._tokens:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits

    def advance(self, token: int) -> None: ...

    def rewind(self, tokens: Sequence[int]) -> None: ...


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_it_writes_what_a_constraint_allows(sampling: Sampling) -> None:
    prefix, unknown = [1, 2, 3], sorted({*range(VOCAB)} - {*DRAFT_IDS.tolist()})
    json_object = Constraint(begin=1, grammar=GRAMMAR_JSON_OBJECT)
    known = DRAFT_IDS[[3, 8, 17]].tolist()
    full = np.full(VOCAB, -np.inf)
    full[known] = logits_of((1, 2, 3), 1)[[3, 8, 17]]
    rules = Rules(json_object, Allow(*known, unknown[0]))
    token, probability = make_drafter().next_token(prefix, sampling, rules)
    assert token == draw(full, sampling, len(prefix)) and 0 < probability <= 1
    beyond = Rules(json_object, Allow(unknown[3], unknown[5]))
    assert make_drafter().next_token(prefix, sampling, beyond) == (unknown[3], 0.0)
    with pytest.raises(Disobeyed):
        make_drafter().next_token(prefix, sampling, Rules(json_object, Allow()))
    ids, amounts = pack_bias({int(DRAFT_IDS[5]): 100.0, unknown[0]: 100.0})
    biased = Rules(Constraint(begin=1, bias_tokens=ids, biases=amounts))
    assert make_drafter().next_token(prefix, sampling, biased)[0] == DRAFT_IDS[5]


def test_only_new_tokens_are_fed() -> None:
    engine = TransparentEngine()
    drafter = make_drafter(engine=engine)
    drafter.next_token(list(range(10)), GREEDY)
    engine.fed.clear()
    drafter.next_token([*range(10), 11, 12], GREEDY)
    assert engine.fed == [11, 12]


def test_written_tokens_are_the_laws_own_draw() -> None:
    prefix = [1, 2, 3]
    drafter = make_drafter()
    assert drafter.next_token(prefix, GREEDY)[0] == DRAFT_IDS[np.argmax(logits_of((1, 2, 3), 1))]
    full = np.full(VOCAB, -np.inf)
    full[DRAFT_IDS] = logits_of((1, 2, 3), 1)
    for seed in range(20):
        sampling = Sampling(temperature=0.8, seed=seed)
        assert drafter.next_token(prefix, sampling)[0] == draw(full, sampling, len(prefix))


def test_shared_noise_puts_the_targets_draw_first() -> None:
    """Where drafter and target agree on the distribution, the target's seeded draw is always the first child."""
    prefix = [5, 6]
    full = np.full(VOCAB, -np.inf)
    full[DRAFT_IDS] = logits_of((5, 6), 1)
    for seed in range(20):
        sampling = Sampling(temperature=1.0, seed=seed)
        tree = make_drafter().draft(prefix, sampling, TreeShape(1, 1, 1)).tree
        assert tree.tokens == (draw(full, sampling, len(prefix)),)


def test_lookup_adds_what_followed_last_time_even_outside_the_draft_vocabulary() -> None:
    outside = next(token for token in range(VOCAB) if token not in DRAFT_IDS)
    prefix = [30, 31, 32, 33, outside, 34, 35, 30, 31, 32, 33]
    tree = make_drafter(lookup=True).draft(prefix, GREEDY, TreeShape(6, 3, 2)).tree
    assert tree.child(ROOT, outside) is not None
    assert (outside, 34, 35) in [path[:3] for path in tree.paths()]
    assert all(outside != token for token in make_drafter().draft(prefix, GREEDY, TreeShape(6, 3, 2)).tree.tokens)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), samplings)
def test_mixed_law_is_a_law_and_sums_to_one(prefix: list[int], sampling: Sampling) -> None:
    """With every candidate kept, the children of the root carry all the probability, lookup or not."""
    drafter = make_drafter(lookup=True)
    assert drafter.lookup is not None
    drafter.lookup.follow(prefix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider_core.drafting.candidates.LEAST_CHILDREN", 10**6)
        patch.setattr("outrider_core.drafting.candidates.CHILDREN", 10**6)
        growth = drafter._begin(prefix, sampling)
    guess = drafter.lookup.guess([])
    inside = guess is None or guess.token in DRAFT_IDS
    assert len(set(growth.tokens)) == len(growth) == len(DRAFT_IDS)
    assert np.exp(growth.scores).sum() == pytest.approx(1.0, abs=1e-6) or not inside


def test_what_the_drafter_rules_out_is_not_what_it_does_not_know() -> None:
    """A guess whose probability underflows loses by it; a token outside the draft vocabulary does not."""
    drafter = make_drafter(lookup=True)
    known, unknown = int(DRAFT_IDS[3]), next(token for token in range(VOCAB) if token not in DRAFT_IDS)
    logits = np.zeros((1, len(DRAFT_IDS)), np.float32)
    logits[0, 3] = -300.0
    for token, least, most in ((known, 0.0, 0.5), (unknown, 0.98, 0.99)):
        ids, log_q = drafter._candidates._ranked([Guess(token, 0.985)], logits, GREEDY)
        assert least < float(np.exp(log_q[0, np.flatnonzero(ids[0] == token)[-1]])) <= most
        assert np.exp(log_q[0]).sum() == pytest.approx(1.0, abs=1e-4)


def test_lookup_knows_the_text_where_a_tree_is_kept() -> None:
    """A tree whose root had been expanded ahead is looked up behind the text that there is now."""
    drafter = make_drafter(lookup=True)
    prefix, shape = [3, 4, 5, 6, 7], TreeShape(8, 4, 4, 0.0)
    tree = drafter.draft(prefix, GREEDY, shape).tree
    drafter.draft_ahead(shape, lambda: False)
    text = [*prefix, tree.tokens[0]]
    assert drafter.draft(text, GREEDY, shape).ahead and drafter.lookup
    own = Lookup()
    own.follow(text)
    assert [drafter.lookup.guess([token]) for token in range(VOCAB)] == [own.guess([token]) for token in range(VOCAB)]
    assert drafter.lookup.guess([3]) == Guess(4, HIT_RATES[1])


def test_an_answer_that_is_asked_for_again_is_drafted_from_the_first_time() -> None:
    drafter = make_drafter(lookup=True)
    rng = random.Random(5)
    text = [rng.randrange(VOCAB) for _ in range(60)]
    shape = TreeShape(8, 8, 8, 0.0)
    wanted = text[36:44]
    before = drafter.draft(text[:36], GREEDY, shape).tree
    drafter.next_token([1], GREEDY)  # another conversation, so that trees begin anew
    drafter.remember(text)
    after = drafter.draft(text[:36], GREEDY, shape).tree
    assert foreseen(after, wanted) == 8 > foreseen(before, wanted)
    drafter.next_token([1], GREEDY)
    drafter.forget()
    assert drafter.draft(text[:36], GREEDY, shape).tree == before


def foreseen(tree: TokenTree, tokens: list[int]) -> int:
    """How many of `tokens` are a path of the tree."""
    node = ROOT
    for done, token in enumerate(tokens):
        child = tree.children[node + 1].get(token)
        if child is None:
            return done
        node = child
    return len(tokens)


def test_no_step_is_wider_than_an_engine_takes() -> None:
    engine = TransparentEngine()
    drafter = make_drafter(engine=engine)
    drafter.next_token([token % VOCAB for token in range(2 * PROMPT_CHUNK + 5)], GREEDY)
    assert engine.widths == [PROMPT_CHUNK, PROMPT_CHUNK, 5]
    engine.widths.clear()
    drafter.draft([1], GREEDY, TreeShape(MAX_NODES, 4, MAX_WIDTH, 0.0))
    assert max(engine.widths) == MAX_WIDTH


def test_stop_returns_what_is_there() -> None:
    tree = make_drafter().draft([1, 2], GREEDY, TreeShape(30, 5, 4), cancelled=lambda: True).tree
    assert LEAST_CHILDREN <= len(tree) <= len(DRAFT_IDS) and set(tree.parents) == {ROOT}


def test_a_step_that_promises_too_little_is_not_made() -> None:
    steps, trees = [], []
    for gain in (0.0, 0.05, 10.0):
        drafter = make_drafter()
        draft = drafter.draft([7, 8], GREEDY, TreeShape(24, 6, 4, gain))
        trees.append(draft.tree)
        steps.append(draft.steps)
    assert steps[0] > steps[1] > steps[2] == 1
    assert set(trees[2].parents) == {ROOT}
    again = drafter.draft([7, 8], GREEDY, TreeShape(24, 6, 4, 0.0))  # nodes that were put back are still there
    assert again.tree == trees[0]


def test_a_node_that_promises_too_little_waits() -> None:
    engine = TransparentEngine()
    drafter = make_drafter(engine=engine)
    widths = []
    for gain in (0.0, 0.4):
        engine.widths.clear()
        drafter.draft([7, 8], GREEDY, TreeShape(24, 6, 8, gain))
        widths.append(engine.widths[1])  # the root's step is the first
        drafter.next_token([7, 8], GREEDY)  # so that the next tree begins anew
    assert 1 <= widths[1] < widths[0] == 8


def test_what_is_worth_expanding() -> None:
    growth = Growth(3)
    growth.add(ROOT, [5, 6, 7], np.log([0.6, 0.2, 0.02]).tolist())
    frontier = growth.frontier(3, 9)
    worst = float(np.log(0.001))
    assert growth.worth_expanding(frontier, worst, 0.0) == 3 and growth.worth_expanding([], worst, 0.0) == 0
    assert growth.worth_expanding(frontier, worst, 0.52) == 2  # they promise 0.39, 0.13 and 0.01: 0.08 would be enough
    assert growth.worth_expanding(frontier, worst, 0.54) == 0
    even = Growth(3)
    even.add(ROOT, list(range(8)), [float(np.log(0.1))] * 8)
    assert even.worth_expanding(even.frontier(8, 9), -np.inf, 0.5) == 1  # none promises its share; together they do


def test_a_full_context_gives_no_tree_and_a_nearly_full_one_a_shallow_one() -> None:
    drafter = make_drafter()
    assert len(drafter.draft([1] * MAX_CONTEXT, GREEDY, TreeShape()).tree) == 0
    assert max(drafter.draft([1] * (MAX_CONTEXT - 2), GREEDY, TreeShape()).tree.depths) == 2


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (MAX_NODES + 1, 1, 1)])
def test_trees_without_nodes_levels_or_branches_or_too_large_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=rf"a tree needs 1\.\.{MAX_NODES} nodes"):
        TreeShape(*numbers)


@pytest.mark.parametrize(("depth", "breadth"), [(1, 65), (9, 64), (513, 1), (100, 100)])
def test_shapes_wider_than_the_engine_or_larger_than_the_cache_are_refused(depth: int, breadth: int) -> None:
    with pytest.raises(ValueError, match=f"breadth must be at most 64 .* at most 512 .*depth={depth}") as caught:
        TreeShape(10, depth, breadth)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("numbers", [(1, 1, 1), (MAX_NODES, 8, 64), (MAX_NODES, 512, 1)])
def test_the_largest_shapes_are_allowed(numbers: tuple[int, int, int]) -> None:
    shape = TreeShape(*numbers)
    assert (shape.nodes, shape.depth, shape.breadth) == numbers
