"""Vectors of the drafter, over an engine that every port can write down, and of the controller."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from edge_runtime.speed.arms import Arm
from edge_runtime.speed.controller import Controller
from outrider_core.drafting.drafter import Draft, Drafter, TreeShape
from outrider_core.drafting.engines import Floats, Ints
from outrider_core.drafting.row_cost import RowCost
from outrider_core.protocol.constraint import Constraint, Rules, pack_bias
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.noise import fmix32
from outrider_core.protocol.rows import RowShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import Welcome
from tests.protocol.make_vectors import plain

MAX_CONTEXT = 120
VOCAB = 60


def mixed(h: int) -> int:
    return int(fmix32(np.array([h % 2**32], np.uint32))[0])


class HashEngine:
    """Logits are a hash of all that a query sees; every number is exact in float32.

    A key's first two values are its token and its position. For a query: h = 1; for every key that it sees, in order,
    h = fmix32(h ^ (0x9E3779B1 * token + position)); for every feature row h = fmix32(h ^ 16 * its first key value).
    The logit of column c is (fmix32(h ^ fmix32(c)) >> 16) / 8192. All modulo 2**32.
    """

    def __init__(self, columns: int) -> None:
        self.columns = fmix32(np.arange(columns, dtype=np.uint32))

    def step(
        self, tokens: Ints, positions: Ints, wanted: Ints, sa_mask: Floats, sa_keys: Floats, sa_values: Floats,
        row_keys: Floats, row_values: Floats,
    ) -> tuple[Floats, Floats, Floats]:  # fmt: skip
        keys = np.zeros((len(tokens), *sa_keys.shape[1:]), np.float32)
        keys[:, 0, 0], keys[:, 0, 1] = tokens, positions
        every = np.concatenate([sa_keys, keys])[:, 0, :2].astype(np.int64)
        logits = []
        for query in wanted:
            h = 1
            for token, position in every[sa_mask[query] == 0.0].tolist():
                h = mixed(h ^ (0x9E3779B1 * token + position) % 2**32)
            for value in row_keys[:, 0, 0].tolist():
                h = mixed(h ^ int(16 * value) % 2**32)
            logits.append((fmix32(self.columns ^ np.uint32(h)) >> np.uint32(16)).astype(np.float32) / np.float32(8192))
        return np.array(logits), keys, keys


def drafter_vectors() -> list[dict[str, Any]]:
    """Conversations with a drafter: each step is a call and what it gave.

    Some are under biases and penalties, some behind other texts.
    """
    return [
        *(conversation(number) for number in range(24)),
        *(conversation(number, ruled=True) for number in range(24, 32)),
        *(conversation(number, others=True) for number in range(32, 38)),
    ]


def row_cost_vectors() -> list[dict[str, Any]]:
    """Steps, each [rows, seconds, what a row costs behind it]."""
    rng, vectors = random.Random(0), list[dict[str, Any]]()
    few, many = [1, 8], [1, 2, 3, 4, 5, 6, 7, 8, 32]
    for share, power, widths in [
        (0.0, 1, few), (0.02, 1, many), (0.4, 1, many), (0.9, 1, [2, 5, 16, 17]), (0.1, 1, [6, 7, 8]),  # too near
        (-0.05, 1, few), (3.0, 1, few), (1.0, 3, [4, 8]),  # one row would take less than nothing
    ]:  # fmt: skip
        learnt, steps = RowCost(), list[list[Any]]()
        for _ in range(20):
            rows = rng.choice(widths)
            seconds = 0.002 * max(0.0, 1 + share * (rows**power - 1)) * rng.choice([1.0, 1.0, 1.1, 1.5, 9.0])
            learnt.took(rows, seconds)
            steps.append([rows, seconds, learnt.value])
        vectors.append({"steps": steps})
    learnt, steps = RowCost(), []
    for seconds in (0.001, 0.002, 0.001, 0.0, 0.001):  # by a clock that ticks once in a while
        for rows in few:
            learnt.took(rows, seconds)
            steps.append([rows, seconds, learnt.value])
    vectors.append({"steps": steps})
    return vectors


def conversation(number: int, ruled: bool = False, others: bool = False) -> dict[str, Any]:
    """ruled: under biases and penalties. others: every now and then the text is over, and the next one resembles it."""
    rng = random.Random(number)
    wide = number % 8 == 7  # more columns than candidates
    draft_ids = sorted(rng.sample(range(900), 700)) if wide else sorted(rng.sample(range(VOCAB), rng.choice([5, 24])))
    shape = RowShape(rng.choice([1, 2]), 2)
    null_row = None if rng.random() < 0.3 else rng_rows(rng, 1, shape)[0]
    lookup = others or rng.random() < 0.6
    sure = [1.0, 0.8, 1.25][number % 3]
    row_cost = [0.0, 0.3, 0.6][number % 7 % 3]
    drafter = Drafter(
        HashEngine(len(draft_ids)), np.array(draft_ids), shape, rng.choice([1, 2]), MAX_CONTEXT, lookup, null_row, sure,
        row_cost,
    )  # fmt: skip
    setup = {
        "draft_ids": draft_ids, "heads": shape.heads, "head_dim": shape.head_dim, "sa_kv_heads": drafter.keys.shape[1],
        "max_context": MAX_CONTEXT, "lookup": lookup, "null_row": None if null_row is None else flat(null_row),
        "confidence_temperature": sure, "row_cost": row_cost,
    }  # fmt: skip
    sampling = rng.choice([Sampling(), Sampling(0.8, seed=rng.randrange(2**40)), Sampling(1.0, seed=number)])
    text = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 7, 40, 90]))]
    rules = rules_of(rng, len(text)) if ruled else None
    if rules:
        setup["constraint"] = plain(rules.constraint)
    steps: list[list[Any]] = []
    for turn in range(12):
        if others and turn % 3 == 2:
            drafter.remember(text)
            steps.append(["remember", list(text)])
            begin = rng.randrange(len(text))
            text = [*(rng.randrange(VOCAB) for _ in range(rng.randrange(4))), *text[begin : begin + 40], *text[:8]]
            if rng.random() < 0.2:
                drafter.forget()
                steps.append(["forget"])
        call = rng.choices(["draft", "ahead", "rows", "write", "keep"], [6, 3, 3, 1, 1])[0]
        if call == "draft":
            tree_shape = TreeShape(
                rng.choice([1, 8, 32]), rng.randrange(1, 9), rng.choice([1, 4, 8]), rng.choice([0.0, 0.05, 0.3])
            )
            draft = drafter.draft(text, sampling, tree_shape, rules=rules)
            steps.append([call, list(text), settings(sampling), asdict(tree_shape), draft_fields(draft)])
            if rng.random() < 0.3:
                steps.append(ahead(drafter, rng))
            text = text + went_on(draft.tree, rng)
            if rng.random() < 0.2:
                text = text[: rng.randrange(1, len(text) + 1)]
            text = text[: MAX_CONTEXT - 1]
        elif call == "ahead":
            steps.append(ahead(drafter, rng))
        elif call == "rows":
            first = rng.randrange(len(text))
            positions = list(range(first, min(len(text), first + rng.randrange(1, 5))))
            rows = rng_rows(rng, len(positions), shape)
            drafter.add_rows(np.array(positions), rows)
            steps.append([call, positions, flat(rows)])
        elif call == "write":
            token, probability = drafter.next_token(text, sampling, rules)
            steps.append([call, list(text), settings(sampling), token, probability])
            text = [*text, token][: MAX_CONTEXT - 1]
        else:
            length = rng.randrange(len(text))
            drafter.keep_rows(length)
            steps.append([call, length])
    return {"setup": setup, "steps": steps}


def rules_of(rng: random.Random, begin: int) -> Rules:
    """Of an answer that begins near `begin`; the penalties are exact in float32."""
    bias = {rng.randrange(VOCAB): rng.randrange(-32, 32) / 8 for _ in range(6)}
    frequency, presence = (rng.randrange(-16, 17) / 8 for _ in range(2))
    return Rules(Constraint(max(0, begin - 2), frequency, presence, *pack_bias(bias)))


def ahead(drafter: Drafter, rng: random.Random) -> list[Any]:
    """Three steps ahead at most."""
    shape, left = TreeShape(16, 4, rng.choice([2, 8])), iter([False, False, False, True])
    return ["ahead", asdict(shape), drafter.draft_ahead(shape, lambda: next(left))]


def went_on(tree: TokenTree, rng: random.Random) -> list[int]:
    """Part of a path of the tree, and a token of another's choice or of a child's."""
    nodes = [node for node in range(len(tree)) if rng.random() < 0.3]
    path = tree.path(rng.choice(nodes)) if nodes else []
    children = tree.children[(path[-1] if path else ROOT) + 1]
    bonus = rng.choice(list(children)) if children and rng.random() < 0.5 else rng.randrange(VOCAB)
    return [*(tree.tokens[node] for node in path), bonus]


def draft_fields(draft: Draft) -> dict[str, Any]:
    return {
        "tokens": list(draft.tree.tokens), "parents": list(draft.tree.parents), "scores": list(draft.scores),
        "steps": draft.steps, "ahead": draft.ahead, "kept": draft.kept,
    }  # fmt: skip


def settings(sampling: Sampling) -> dict[str, Any]:
    return msgspec.structs.asdict(sampling)


def rng_rows(rng: random.Random, count: int, shape: RowShape) -> Floats:
    """Rows of sixteenths, which float32 holds exactly."""
    values = [rng.randrange(-64, 64) / 16 for _ in range(count * 2 * shape.heads * shape.head_dim)]
    return np.array(values, np.float32).reshape(count, 2, *shape)


def flat(rows: Floats) -> list[float]:
    return [float(value) for value in rows.ravel()]


def controller_vectors() -> list[dict[str, Any]]:
    """Measurements one after another, and what follows from each."""
    return [
        *(measured(number) for number in range(12)),
        *(steady(number) for number in range(4)),
        *(tried_ahead(slowed) for slowed in (1.0, 2.0)),
        *(drafting_understudy(number) for number in range(6)),
    ]


def measured(number: int) -> dict[str, Any]:
    """Anything may happen."""
    rng = random.Random(number)
    controller = Controller(pinned=rng.choice([None, None, None, Arm.TREE, Arm.STREAM]))
    curve = CostCurve((1, 16, 64), (0.02, 0.03, 0.08))
    steps: list[list[Any]] = []
    for _ in range(40):
        tree, scores = random_tree(rng)
        shape = [list(tree.tokens), list(tree.parents)]
        call = rng.choice(["linked", "drafted", "verified", "verified", "streamed", "foreseen", "waited", "prepared"])
        arguments: list[Any]
        if call == "linked":
            told = rng.choice([0, 60, 100, 275]), rng.choice([0, 4_500])
            arguments = link(controller, rng.choice([b"", curve.pack()]), rng.uniform(0, 0.3), *told)
        elif call == "drafted":
            arguments = [rng.uniform(0, 0.1), rng.randrange(4)]
            controller.tree.drafted(*arguments)
        elif call == "verified":
            path = tree.path(rng.choice([ROOT, *range(len(tree))]))
            sent = scores if rng.random() < 0.8 else []
            arguments = [*shape, sent, path, rng.uniform(0, 0.5), rng.choice([0, 0.03])]
            controller.verified(tree, *arguments[2:])
        elif call == "streamed":
            arguments = [rng.choice([0, rng.uniform(0, 0.2)]), rng.choice([0, 0.02, 0.04])]
            arguments += [rng.random() < 0.3]
            controller.streamed(*arguments)
        elif call == "foreseen":
            arguments = [*shape, scores, tree.path(rng.choice([ROOT, *range(len(tree))])), rng.uniform(0, 0.1)]
            controller.foreseen(tree, *arguments[2:])
        elif call == "waited":
            arguments = [rng.uniform(0, 0.05)]
            controller.waited(*arguments)
        else:
            arguments = []
            controller.prepared()
        choice = rng.choice(["begin", "go_on", "choose", "choose", "choose"])
        steps.append([call, arguments, what_follows(controller, tree, scores, choice)])
    return {"pinned": controller.pinned, "steps": steps}


def steady(number: int) -> dict[str, Any]:
    """A link on which streams are tried; in every other run they turn out to be the faster mode."""
    rng, tree = random.Random(number), TokenTree.chain([1, 2, 3])
    controller = Controller()
    costs = CostCurve((1, 16, 64), (0.03, 0.03, 0.08)).pack()
    steps = [["linked", link(controller, costs, 0.001), what_follows(controller, tree, [], "begin")]]
    for _ in range(60):
        arguments: list[Any]
        if controller.arm is Arm.TREE:
            call, path = "verified", [0] if rng.random() < 0.1 else []
            arguments = [list(tree.tokens), list(tree.parents), [], path, rng.uniform(0.03, 0.035), 0.03]
            controller.verified(tree, *arguments[2:])
        else:
            call, arguments = "streamed", [rng.uniform(0.01, 0.02) * (1 + 2 * (number % 2)), 0.01, False]
            controller.streamed(*arguments)
        steps.append([call, arguments, what_follows(controller, tree, [], "choose")])
    return {"pinned": None, "steps": steps}


def tried_ahead(slowed: float) -> dict[str, Any]:
    """Rounds where drafting ahead is tried; it makes a step `slowed` times as long. At last another verifier."""
    tree, controller, steps = TokenTree.chain([1, 2, 3]), Controller(pinned=Arm.TREE), list[list[Any]]()
    follows = lambda: what_follows(controller, tree, [], "choose")  # noqa: E731
    for first in (0.01, 0.02):
        curve = CostCurve((1, 16, 64), (first, 0.03, 0.08))
        steps.append(["linked", link(controller, curve.pack(), 0.001), follows()])
        for number in range(60):
            drafts = controller.ahead.now
            engine = curve.at(4) * (slowed if drafts else 1.0)
            verified = [[], [0], engine + 0.001, 0.0 if number == 9 else engine]
            controller.verified(tree, *verified)
            steps.append(["verified", [list(tree.tokens), list(tree.parents), *verified], follows()])
            drafted = [0.01, 4]
            controller.tree.drafted(*drafted)
            steps.append(["drafted", drafted, follows()])
            waited = [0.004 if drafts else 0.01]
            controller.waited(*waited)
            steps.append(["waited", waited, follows()])
    return {"pinned": controller.pinned, "steps": steps}


def drafting_understudy(number: int) -> dict[str, Any]:
    """An understudy that is ready, or is not any more, drafts chains that come true or do not."""
    rng, tree = random.Random(number), TokenTree.chain([1, 2, 3])
    controller = Controller()
    costs = CostCurve((1, 16, 64), (0.05, 0.06, 0.08)).pack()
    steps = [["linked", link(controller, costs, 0.02), what_follows(controller, tree, [], "begin")]]
    right = rng.uniform(0.4, 1.0)
    for _ in range(60):
        call = rng.choice(["chain_ready", "chain_drafted", "chain_verified", "chain_verified", "verified", "compared"])
        arguments: list[Any]
        if call == "chain_ready":
            arguments = [rng.random() < 0.9]
            (controller.chain.ready,) = arguments
        elif call == "chain_drafted":
            arguments = [rng.randrange(5), rng.uniform(0.0, 0.1)]
            controller.chain.drafted(*arguments)
        elif call == "chain_verified":
            tokens = rng.randrange(1, 17)
            accepted = next((place for place in range(tokens) if rng.random() > right), tokens)
            arguments = [tokens, accepted, rng.uniform(0.05, 0.1), rng.choice([0, 0.05])]
            controller.chain_verified(*arguments)
        elif call == "compared":
            arguments = [rng.randrange(1, 17), rng.randrange(17)]
            controller.chain.verified(*arguments)
        else:
            arguments = [list(tree.tokens), list(tree.parents), [], [0][: rng.randrange(2)], 0.08, 0.055]
            controller.verified(tree, *arguments[2:])
        steps.append([call, arguments, what_follows(controller, tree, [], "choose")])
    return {"pinned": None, "steps": steps}


def link(controller: Controller, costs: bytes, rtt: float, stream_tokens: int = 0, queue_us: int = 0) -> list[Any]:
    told = {"stream_tokens": stream_tokens, "queue_us": queue_us}
    controller.linked(Welcome(1, "t", "d", 9, 9, 9, 9, "", costs, **told), rtt)
    return [costs.hex(), rtt, stream_tokens, queue_us]


def what_follows(controller: Controller, tree: TokenTree, scores: list[float], choice: str) -> dict[str, Any]:
    calls = {"begin": controller.begin, "go_on": lambda: controller.begin(unknown=False), "choose": controller.choose}
    return {
        "rates": controller.rates(), "gain": controller.tree.gain(controller.costs),
        "chain": controller.chain.best(controller.costs)[0],
        "compares": [controller.compares(Arm.TREE), controller.compares(Arm.CHAIN)],
        "ahead": controller.ahead.now, "drafting": controller.tree.worth_drafting(),
        "tree": [list(tree.tokens), list(tree.parents), scores],
        "nodes": controller.tree.worth_sending(tree, scores, controller.costs),
        "call": choice, "arm": calls[choice](), "trial": controller.trial,
    }  # fmt: skip


def random_tree(rng: random.Random) -> tuple[TokenTree, list[float]]:
    tokens, parents = list[int](), list[int]()
    for node in range(rng.randrange(12)):
        tokens.append(node)
        parents.append(rng.randrange(-1, node))
    tree = TokenTree(tuple(tokens), tuple(parents))
    return tree, sorted((-rng.expovariate(1.0) for _ in tokens), reverse=True)
