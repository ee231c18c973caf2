"""Random scenarios for `benchmarks.controller`: texts, drafters, verifiers, links and what disturbs them. Seconds.

A scenario is a conversation of several answers. Its text is fixed: for each position the rank of the true token among
the drafter's choices there, and whether understudy and lookup predict it. So every way to write it meets the same text,
and the same disturbances at the same time of each answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.links import PROFILES, Profile
from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.growth import Growth
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.tree import ROOT, TokenTree

#: probabilities that the drafter may give its first choice
SURE = (0.12, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.97)
#: ranks of the drafter's choices; the true token is one of them, or has rank CHOICES
CHOICES = 3
#: seconds of a verifier's steps by tokens: measured ones of this product's engines (lab/notebook.md), and invented ones
CURVES = {
    "8-bit on a CPU": CostCurve((1, 9, 33, 64), (0.0137, 0.022, 0.061, 0.118)),
    "8-bit, VNNI": CostCurve((1, 4, 16, 48), (0.0095, 0.0122, 0.03, 0.078)),
    "float32 on a CPU": CostCurve((1, 8, 32, 64), (0.06, 0.075, 0.13, 0.22)),
    "bfloat16 on a CPU": CostCurve((1, 33, 64), (0.0176, 0.0334, 0.052)),
    "60 ms": CostCurve((1, 33, 64), (0.06, 0.064, 0.075)),
    "100 ms": CostCurve((1, 33, 64), (0.1, 0.104, 0.12)),
    "GPU": CostCurve((1, 64, 128), (0.025, 0.026, 0.032)),
    "fast GPU": CostCurve((1, 64, 128), (0.008, 0.009, 0.012)),
}
#: links that are met three times as often as the others
NEAR = ("lan", "wifi", "5g", "4g")
#: what changes while answers are written
DISTURBANCES = ("none", "drift", "jitter", "load", "suspend", "steps", "shared cores", "wrong curve")
ANSWERS = 6
#: tokens of one step of a stream at most
TOGETHER = 5
#: of scenarios, those whose verifier cannot tell yet what its streams bring; by how much its figure is off at most
UNTOLD, OFF = 0.2, 1.25
#: how often understudies write what the target writes
UNDERSTUDIES = (0.6, 0.75, 0.85, 0.93)


@dataclass(frozen=True)
class Passage:
    """An answer's text, by position. levels: index into SURE. ranks: of the true token. written: whether the understudy
    writes it too. looked_up: whether lookup in a stream brings it with the token before."""

    prompt: int
    levels: list[int]
    ranks: list[int]
    written: list[bool]
    looked_up: list[bool]

    @property
    def length(self) -> int:
        return len(self.levels)

    def together(self, at: int) -> int:
        """Tokens of the step of a stream that begins at `at`: its own, and what lookup brings with it."""
        count = 1
        while at + count < self.length and count < TOGETHER and self.looked_up[at + count]:
            count += 1
        return count

    def steps(self) -> int:
        """Steps of a stream."""
        at = count = 0
        while at < self.length:
            at, count = at + self.together(at), count + 1
        return count


@dataclass(frozen=True)
class Scenario:
    """profile: the link. curve: the verifier's; advertised: as WELCOME has it, None: not at all. boast: by how much the
    drafter overrates its choices. draft_step: of the drafter; reading: a token of the prompt. token: of the understudy,
    None: there is none. crowding: factor on a step of the verifier while the device drafts. slow, queue: factor on
    steps and time in the verifier's queue, by answer and time in it. asleep: when the device is suspended, in
    every other answer: (from, to)."""

    number: int
    disturbance: str
    curve_name: str
    profile: Profile
    curve: CostCurve
    advertised: CostCurve | None
    boast: float
    draft_step: float
    reading: float
    token: float | None
    crowding: float
    slow: Callable[[int, float], float]
    queue: Callable[[int, float], float]
    asleep: tuple[float, float]
    passages: list[Passage]

    def told(self) -> tuple[int, int]:
        """WELCOME's `stream_tokens`, of texts like these, and `queue_us`, of the first seconds."""
        rng = random.Random(f"told {self.number}")
        steps = sum(passage.steps() for passage in self.passages)
        tokens = sum(passage.length for passage in self.passages) / steps * OFF ** rng.uniform(-1, 1)
        queue = float(np.mean([self.queue(0, at) for at in range(10)]))
        return 0 if rng.random() < UNTOLD else round(100 * tokens), round(1e6 * queue)


def choices(level: int) -> list[float]:
    """Probabilities of the drafter's choices for one position."""
    first = SURE[level]
    second = min(first, 0.25 * (1 - first))
    return [first, second, min(second, 0.1 * (1 - first))]


@cache
def draft(level: int, boast: float, nodes: int, gain: float) -> tuple[TokenTree, tuple[float, ...], int]:
    """(tree, log path probabilities, engine steps): what the drafter grows where it is as sure as `level`."""
    shape = TreeShape(nodes=nodes, gain=gain)
    claimed = [float(np.log(min(0.99, boast * p))) for p in choices(level)]
    tokens = list(range(1, 1 + CHOICES))
    growth, steps, depth = Growth(0), 1, min(shape.depth, nodes)
    growth.add(ROOT, tokens, claimed)
    while True:
        worst = growth.worst_of_best(nodes, depth)
        frontier = growth.frontier(shape.breadth, depth, worst)
        expanded = frontier[: growth.worth_expanding(frontier, worst, gain)]
        if not expanded:
            break
        growth.put_back(frontier[len(expanded) :])
        for node in expanded:
            growth.slots[node] = node
            growth.add(node, tokens, claimed)
        steps += 1
    tree, scores = growth.best(nodes, depth)
    return tree, tuple(scores), steps


def scenario(number: int, recorded: Path | None = None, answers: int = ANSWERS) -> Scenario:
    """Return the scenario of this number, of so many answers. recorded: texts to take in place of invented ones."""
    rng = random.Random(number)
    disturbance = DISTURBANCES[number % len(DISTURBANCES)]
    curve_name = rng.choice(list(CURVES))
    curve = CURVES[curve_name]
    near = [PROFILES[name] for name in NEAR]
    profile = rng.choice([*PROFILES.values(), *near, *near])
    if disturbance == "shared cores":
        profile, curve_name = PROFILES["lan"], rng.choice([name for name in CURVES if "CPU" in name])
        curve = CURVES[curve_name]
    if disturbance == "jitter":
        profile = Profile("jitter", profile.rtt, rng.uniform(0.3, 1.0) * max(2.0, profile.rtt), 2 + profile.loss)
    advertised: CostCurve | None = curve
    if disturbance == "wrong curve":
        advertised = rng.choice([None, _distorted(curve, rng), _distorted(curve, rng)])
    slow, queue = _weather(disturbance, number, rng, curve, answers)
    start = rng.uniform(0.2, 2.0)
    asleep = (start, start + rng.uniform(0.5, 5.0)) if disturbance == "suspend" else (inf, inf)
    understudy = rng.random() < 0.25
    passages = _recorded(recorded, rng, answers) if recorded else _passages(rng, answers)
    return Scenario(
        number, disturbance, curve_name, profile, curve, advertised,
        boast=rng.choice([0.8, 1.0, 1.0, 1.25]),
        draft_step=rng.choice([0.0009, 0.002, 0.004, 0.009, 0.016]),
        reading=rng.choice([0.00005, 0.0002, 0.0005]),
        token=rng.choice([0.004, 0.009, 0.02]) if understudy else None,
        crowding=rng.uniform(1.15, 1.8) if disturbance == "shared cores" else 1.0,
        slow=slow, queue=queue, asleep=asleep, passages=passages,
    )  # fmt: skip


def _distorted(curve: CostCurve, rng: random.Random) -> CostCurve:
    """Distort a curve as a disturbance at the verifier's start may: a single token, or trees, too expensive."""
    one, many = rng.choice([(rng.uniform(1.2, 1.8), 1.0), (1.0, rng.uniform(1.2, 1.8)), (0.6, 0.6), (1.6, 1.6)])
    seconds = [one * curve.seconds[0], *(many * each for each in curve.seconds[1:])]
    return CostCurve(curve.tokens, tuple(float(each) for each in np.maximum.accumulate(seconds)))


def _weather(
    disturbance: str, number: int, rng: random.Random, curve: CostCurve, answers: int
) -> tuple[Callable[[int, float], float], Callable[[int, float], float]]:
    """(factor on the verifier's steps, seconds in its queue), by answer and seconds since that began."""
    quiet = lambda answer, at: 0.0  # noqa: E731
    if disturbance == "drift":
        ratio = rng.choice([0.4, 0.6, 1.7, 2.5])
        return lambda answer, at: ratio ** ((answer + min(1.0, at / 8)) / answers), quiet
    if disturbance == "steps":
        return lambda answer, at: (_noise(number, answer, int(at)) and 2.0) or 1.0, quiet
    if disturbance == "load":
        most, period = rng.uniform(0.5, 3.0) * curve.at(8), rng.uniform(2, 10)
        busy = lambda answer, at: _noise(number, answer, int(at / period))  # noqa: E731
        return (lambda answer, at: 1.0 + 0.4 * busy(answer, at)), (lambda answer, at: most * busy(answer, at))
    return (lambda answer, at: 1.0), quiet


@cache
def _noise(*place: int) -> bool:
    """A coin thrown for `place`."""
    return random.Random(repr(place)).random() < 0.5


def _passages(rng: random.Random, answers: int) -> list[Passage]:
    usual, spread = rng.uniform(1.5, 6.0), rng.uniform(0.3, 1.6)
    lookup = rng.choice([0.0, 0.0, 0.1, 0.2, 0.4])
    right = rng.choice(UNDERSTUDIES)
    made = []
    for _ in range(answers):
        of_answer, levels = rng.gauss(usual, spread), list[int]()
        length = rng.choice([48, 64, 96, 128])
        hits = min(0.8, lookup * rng.uniform(0.2, 2.0))
        while len(levels) < length:
            level = min(len(SURE) - 1, max(0, round(rng.gauss(of_answer, 1.2))))
            levels += [level] * min(length - len(levels), 1 + int(rng.expovariate(1 / 6)))
        ranks = [rng.choices(range(CHOICES + 1), [*(p := choices(each)), max(0.0, 1 - sum(p))])[0] for each in levels]
        a = min(0.98, max(0.3, rng.gauss(right, 0.06)))
        made.append(
            Passage(
                rng.choice([20, 60, 200, 700]), levels, ranks,
                [rng.random() < a for _ in levels], [rng.random() < hits for _ in levels],
            )
        )  # fmt: skip
    return made


def _recorded(path: Path, rng: random.Random, answers: int) -> list[Passage]:
    texts: Sequence[dict[str, list[int]]] = json.loads(path.read_text())["answers"]
    right = rng.choice(UNDERSTUDIES)
    return [
        Passage(
            answer["prompt"][0], answer["levels"], answer["ranks"],
            [rng.random() < right for _ in answer["levels"]], [bool(each) for each in answer["looked_up"]],
        )
        for answer in rng.sample(texts, answers)
    ]  # fmt: skip
