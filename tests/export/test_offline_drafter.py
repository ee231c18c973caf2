"""The drafter's trees let an understudy that writes alone write several tokens a step, and change none of them."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from edge_runtime.answer.offline_drafter import TIMED_NODES, OfflineDrafter, offline_drafter_for
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.speed.arms import Arm
from export.bundle.understudy import write_understudy
from outrider_core.drafting.bundle import MANIFEST, SERVER_HALF_FILE, UNDERSTUDY_FOLDER, Bundle, open_bundle
from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.engines import Engine, open_engine
from outrider_core.protocol.constraint import Constraint, Rules, pack_bias
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets.bundle import open_target_bundle
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.source import TargetSource
from outrider_core.targets.understudy import Decoding, Understudy, UnderstudyDrafter
from tests.export.conftest import Bundles, Folders
from tests.targets.plain import skip_unless_exact
from tests.tiers import first

PROMPT = [1, 17, 44, 101, 9]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=7)]
pytestmark = pytest.mark.usefixtures("throwaway_cache")


@pytest.fixture
def folder(bundles: Bundles, folders: Folders, tmp_path: Path) -> Path:
    """A bundle with its target as the understudy, which a test may break."""
    copied = Path(shutil.copytree(bundles("int8"), tmp_path / "bundle"))
    manifest = open_bundle(copied).manifest
    manifest.understudy = write_understudy(TargetSource.resolve(str(folders.target)), copied, manifest.max_context)
    (copied / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return copied


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    skip_unless_exact(8)
    return open_bundle(folder)


def made(bundle: Bundle, drafter: UnderstudyDrafter | None = None) -> Understudy:
    entry, manifest = bundle.manifest.understudy, bundle.manifest
    assert entry
    folder = bundle.folder / entry.folder
    return Understudy(
        folder,
        entry.manifest_sha256,
        manifest.max_context,
        manifest.vocab_size,
        lambda ids: "",
        1,
        lambda model: drafter,
    )


def found(bundle: Bundle, engine: Engine | None = None, mode: Arm | None = None) -> OfflineDrafter | None:
    model = open_target_bundle(bundle.folder / UNDERSTUDY_FOLDER).config
    return offline_drafter_for(bundle, engine or open_engine(bundle, None, 1), model, mode=mode)


def guesses(bundle: Bundle, mode: Arm | None = None) -> OfflineDrafter:
    drafter = found(bundle, mode=mode)
    assert drafter
    return drafter


def written(
    understudy: Understudy, count: int, sampling: Sampling, rules: Rules | None = None
) -> list[tuple[int, float]]:
    text, found = list(PROMPT), list[tuple[int, float]]()
    for _ in range(count):
        found.append(understudy.next_token(text, Decoding(len(PROMPT), sampling, rules)))
        text.append(found[-1][0])
    return found


class Oracle:
    """Knows what will be written, and hides it among wrong guesses; now and then it knows nothing."""

    def __init__(self, truth: list[int], vocab: int) -> None:
        self.truth, self.vocab, self.rng, self.steps = truth, vocab, random.Random(1), 0

    def tree(
        self,
        understudy: Understudy,
        text: list[int],
        decoding: Decoding,
        cancelled: Callable[[], bool],
    ) -> TokenTree:
        tokens, parents, parent = list[int](), list[int](), ROOT
        for right in self.truth[len(text) : len(text) + self.rng.randrange(6)]:
            siblings = {right, *(self.rng.randrange(self.vocab) for _ in range(self.rng.randrange(3)))}
            if self.rng.random() < 0.2:
                siblings = {(right + 1) % self.vocab}
            first = len(tokens)
            tokens += siblings
            parents += [parent] * len(siblings)
            if right not in siblings:
                break
            parent = tokens.index(right, first)
        return TokenTree(tuple(tokens), tuple(parents))

    def stepped(self, seconds: float) -> None:
        self.steps += 1

    def forget(self) -> None:
        pass


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_guesses_save_steps_and_change_no_token_and_no_probability(bundle: Bundle, sampling: Sampling) -> None:
    plain = written(made(bundle), 120, sampling)
    oracle = Oracle([*PROMPT, *(token for token, _ in plain)], bundle.manifest.vocab_size)
    assert written(made(bundle, oracle), 120, sampling) == plain
    assert oracle.steps < 80


def test_guesses_under_a_constraint(bundle: Bundle) -> None:
    ids, amounts = pack_bias({50: 6.0, 60: 6.0})
    constraint = Constraint(len(PROMPT), 2.0, 0.5, ids, amounts)
    plain = written(made(bundle), 40, Sampling(), Rules(constraint))
    oracle = Oracle([*PROMPT, *(token for token, _ in plain)], bundle.manifest.vocab_size)
    assert written(made(bundle, oracle), 40, Sampling(), Rules(constraint)) == plain
    assert written(made(bundle, guesses(bundle)), 40, Sampling(), Rules(constraint)) == plain


def test_a_text_may_change_anywhere_below_and_beside_a_guess(bundle: Bundle) -> None:
    plain = [*PROMPT, *(token for token, _ in written(made(bundle), 60, Sampling()))]
    oracle, rng = Oracle(plain, bundle.manifest.vocab_size), random.Random(3)
    understudy = made(bundle, oracle)
    for _ in range(60):
        end = rng.randrange(1, len(plain))
        text = plain[:end] if rng.random() < 0.5 else [*plain[: end - 1], (plain[end - 1] + 1) % 199]
        if rng.random() < 0.2:
            understudy.draft(text, 3, Decoding(len(PROMPT)))
        if rng.random() < 0.2:
            understudy.agreed([*text, 7, 8], len(text), Decoding(0))
        assert understudy.next_token(text, Decoding(0)) == made(bundle).next_token(text, Decoding(0))


@pytest.mark.parametrize("mode", first(2, [Arm.TREE, None, Arm.STREAM]))
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_the_drafters_guesses_change_nothing_whatever_is_chosen(
    bundle: Bundle, mode: Arm | None, sampling: Sampling
) -> None:
    drafter = guesses(bundle)
    drafter.controller.pinned = mode
    understudy = made(bundle, drafter)
    count = bundle.manifest.max_context - len(PROMPT)  # to the very end of the context
    assert written(understudy, count, sampling) == written(made(bundle), count, sampling)
    if mode is Arm.TREE:  # a random model repeats itself, and that is looked up
        assert drafter.controller.tree.usual_tau > 1
    assert written(understudy, 20, sampling) == written(made(bundle), 20, sampling)


class Timed:
    """An understudy of which only the times matter: a step takes `seconds` and `per_node` more for each node. width: of
    the keys and values of a layer."""

    def __init__(self, seconds: float, per_node: float, width: int) -> None:
        self.seconds, self.per_node, self.width = seconds, per_node, width

    def time_step(self, nodes: int) -> float:
        return self.seconds + nodes * self.per_node

    def gather(self, layers: tuple[int, ...], positions: range) -> np.ndarray:
        return np.ones((len(positions), len(layers), self.width), np.float32)


@pytest.mark.parametrize(("per_node", "chosen"), [(0.0, Arm.TREE), (50.0, Arm.STREAM)])
def test_trees_are_drafted_only_where_they_make_it_faster(bundle: Bundle, per_node: float, chosen: Arm) -> None:
    drafter = guesses(bundle)
    timed = Timed(10.0, per_node, drafter._features._config.kv_width)
    text = [*PROMPT, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39] * 6  # lookup knows how it goes on
    size, trees = 40, 0
    while size < len(text) - 1:
        tree = drafter.tree(timed, text[:size], Decoding(5), lambda: False)  # type: ignore[arg-type]
        drafter.stepped(timed.time_step(len(tree)))
        trees += bool(tree)
        node, size = tree.child(ROOT, text[size]), size + 1
        while node is not None and size < len(text) - 1:
            node, size = tree.child(node, text[size]), size + 1
    curve = drafter.controller.costs.curve
    assert curve and curve.seconds == tuple(timed.time_step(nodes) for nodes in TIMED_NODES)
    assert drafter.controller.arm is chosen
    assert trees <= 3 if chosen is Arm.STREAM else trees >= 4


def test_trees_that_are_worth_nothing_cost_next_to_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short answers to long prompts, which the drafter would have to read, by a clock of their own."""
    drafter, clock = guesses(bundle), [0.0]
    timed = Timed(0.02, 0.02, drafter._features._config.kv_width)
    monkeypatch.setattr("edge_runtime.answer.offline_drafter.time.perf_counter", lambda: clock[0])
    step = drafter._made.args[1].step

    def slow(*inputs: np.ndarray) -> object:
        clock[0] += 0.01 * len(inputs[0])
        return step(*inputs)

    monkeypatch.setattr(drafter._made.args[1], "step", slow)
    rng, taken, plain = random.Random(0), 0.0, 0.0
    for answer in range(60):
        text = [1] + [rng.randrange(4, 199) for _ in range(150)]
        began = clock[0]
        for _ in range(40):
            tree = drafter.tree(timed, text, Decoding(151), lambda: False)  # type: ignore[arg-type]
            seconds = timed.time_step(len(tree))
            clock[0] += seconds
            drafter.stepped(seconds)
            text.append(next(t for t in iter(lambda: rng.randrange(4, 199), 0) if tree.child(ROOT, t) is None))
        if answer >= 20:
            taken, plain = taken + clock[0] - began, plain + 40 * 0.02
    assert taken < 1.05 * plain


def test_a_guess_below_a_text_that_was_given_up_is_not_taken(bundle: Bundle) -> None:
    plain = [*PROMPT, *(token for token, _ in written(made(bundle), 60, Sampling()))]
    for end in range(10, 40):
        oracle = Oracle(plain, bundle.manifest.vocab_size)
        understudy = made(bundle, oracle)
        understudy.next_token(plain[:end], Decoding(0))
        other = [*plain[: end - 4], (plain[end - 4] + 1) % 199, 7]
        asked = iter([False])
        understudy.read_to_write(other, Decoding(0), lambda asked=asked: next(asked, True))  # type: ignore[misc]
        for length in (end - 3, end - 2):
            expected = made(bundle).next_token(plain[:length], Decoding(0))
            assert understudy.next_token(plain[:length], Decoding(0)) == expected


def test_rows_are_those_of_the_text(bundle: Bundle) -> None:
    drafter = guesses(bundle)
    drafter.controller.pinned = Arm.TREE
    understudy = made(bundle, drafter)
    text = [*PROMPT, *(token for token, _ in written(understudy, 30, Sampling()))]
    other = [*text[:10], *range(60, 90)]
    understudy.next_token(other, Decoding(10))
    fresh = guesses(bundle)
    fresh.controller.pinned = Arm.TREE
    another = made(bundle, fresh)
    written(another, 12, Sampling(temperature=1.0, seed=3))  # the first tokens time steps
    another.next_token(other, Decoding(10))
    drafter, other_drafter = drafter._drafter, fresh._drafter
    assert drafter and other_drafter
    held = np.flatnonzero(other_drafter.rows.filled)
    assert held.tolist() == list(range(len(other) - 1)) == np.flatnonzero(drafter.rows.filled).tolist()
    for part in ("keys", "values"):
        both = getattr(drafter.rows, part)[1 : len(other)], getattr(other_drafter.rows, part)[1 : len(other)]
        assert np.allclose(*both, atol=1e-5)


def test_guesses_want_the_drafters_own_target_and_its_server_half(folder: Path) -> None:
    bundle = open_bundle(folder)
    engine, path = open_engine(bundle, None, 1), folder / SERVER_HALF_FILE
    assert found(bundle, engine)
    tensors, whole = load_file(path), path.read_bytes()
    with safe_open(str(path), "numpy") as file:
        described = file.metadata()
    config = json.loads(described["config"])
    for other in ({}, {"drafter_hash": "other", "config": "{}"}, {"drafter_hash": bundle.manifest.drafter_hash}):
        save_file(tensors, path, metadata=other)
        assert found(bundle, engine) is None
    for wrong in (
        5, None, [], {}, "[" * 100_000, config | {"target_layers": 5}, config | {"target_layers": [99, 1, 0]},
        config | {"target_layers": [-1, 0, 1]}, config | {"lsa_heads": 0}, config | {"head_dim": 4},
        config | {"target_head_dim": 10**12}, config | {"norm_eps": "x"}, config | {"rope_theta": 0},
    ):  # fmt: skip
        text = wrong if isinstance(wrong, str) else json.dumps(wrong)
        save_file(tensors, path, metadata=described | {"config": text})
        assert found(bundle, engine) is None, wrong
    for name in tensors:
        for spoilt in (tensors[name][..., :1].copy(), np.full_like(tensors[name], np.nan)):
            save_file(tensors | {name: spoilt}, path, metadata=described)
            if tensors[name].ndim > 1 or np.isnan(spoilt).any():  # a vector of one number is one for all
                assert found(bundle, engine) is None, name
    for broken in (b"", whole[:100], b"\0" * 100):
        path.write_bytes(broken)
        assert found(bundle, engine) is None
    path.unlink()
    assert found(bundle, engine) is None
    path.write_bytes(whole)
    assert bundle.manifest.understudy
    bundle.manifest.understudy.source_hash = "another"
    assert found(bundle, engine) is None


async def texts(bundle: Bundle, policy: Policy) -> tuple[list[int], bool]:
    async with EdgeRuntime(bundle, None, RuntimeOptions(policy=policy, threads=1)) as runtime:
        events = [event async for event in runtime.generate(PROMPT, max_new_tokens=40)]
        return events[-1].token_ids, runtime._understudy.understudy._drafter is not None  # type: ignore[union-attr]


def test_a_device_alone_has_them(bundle: Bundle) -> None:
    with_them, present = asyncio.run(texts(bundle, Policy(writer="device-only")))
    assert present and len(with_them) > 0
    bundle.path(SERVER_HALF_FILE).unlink()
    without, present = asyncio.run(texts(bundle, Policy(writer="device-only")))
    assert not present and with_them == without
    linked = EdgeRuntime(bundle, "127.0.0.1:1", RuntimeOptions(threads=1))._understudy.understudy
    linked.load()
    assert linked._drafter is None


class Failing:
    """An engine that computes nothing."""

    def step(self, *inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        raise RuntimeError("out of memory")


def test_guessing_that_fails_leaves_the_understudy_to_write(bundle: Bundle) -> None:
    drafter = found(bundle, Failing(), Arm.TREE)
    assert drafter
    understudy = made(bundle, drafter)
    assert written(understudy, 20, Sampling()) == written(made(bundle), 20, Sampling())
    assert understudy._drafter is None


def test_an_understudy_whose_guesses_cannot_be_made_writes_without(bundle: Bundle) -> None:
    def make(model: TargetConfig) -> UnderstudyDrafter:
        raise OSError("no such file")

    understudy = made(bundle)
    understudy._make_drafter = make
    assert written(understudy, 5, Sampling()) == written(made(bundle), 5, Sampling())


def test_guessing_is_given_up_where_nobody_waits(bundle: Bundle) -> None:
    drafter = guesses(bundle, Arm.TREE)
    understudy = made(bundle, drafter)
    long = [1, *(4 + place % 190 for place in range(200))]
    for _ in range(6):  # the first tokens time steps
        understudy.next_token(PROMPT, Decoding(len(PROMPT)))
        understudy.next_token([*PROMPT, 7], Decoding(len(PROMPT)))
    asked = [0]

    def cancelled() -> bool:
        asked[0] += 1
        return asked[0] >= 9  # the text is read, and some rows

    assert not understudy.read_to_write(long, Decoding(len(long)), cancelled)
    assert drafter._rows < len(long) - 1 or len(drafter._drafter.cached) < len(long) - 1  # type: ignore[union-attr]
    assert understudy.next_token(long, Decoding(5)) == made(bundle).next_token(long, Decoding(5))


def test_what_is_forgotten_is_given_back(bundle: Bundle) -> None:
    drafter = guesses(bundle, Arm.TREE)
    understudy = made(bundle, drafter)
    written(understudy, 20, Sampling())
    assert drafter._drafter and drafter._text
    understudy.forget()
    assert drafter._drafter is None and not drafter._text and not drafter._rows
    assert written(understudy, 20, Sampling()) == written(made(bundle), 20, Sampling())
    assert drafter._drafter
    understudy.unload()
    assert drafter._drafter is None  # type: ignore[unreachable]


def test_the_users_choices_reach_them(bundle: Bundle) -> None:
    shape = TreeShape(nodes=2, depth=2)
    runtime = EdgeRuntime(
        bundle, None, RuntimeOptions(threads=1, shape=shape, lookup=False), pinned=Pinned(mode="tree")
    )
    runtime._understudy.understudy.load()
    drafter = runtime._understudy.understudy._drafter
    assert isinstance(drafter, OfflineDrafter) and drafter.controller.pinned is Arm.TREE
    written(made(bundle, drafter), 20, Sampling())
    assert drafter._drafter and drafter._drafter.lookup is None and len(drafter._step.tree) <= 2  # type: ignore[union-attr]
