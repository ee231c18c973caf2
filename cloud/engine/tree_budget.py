"""Choose the size of trees from measured step times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log2

from cloud.engine.kvpool import GRANULE
from cloud.engine.runner import ModelRunner
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import MAX_NODES, TokenTree
from outrider_core.targets.part import Part

#: tree sizes that are considered
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MAX_NODES)
#: devices are never asked for smaller trees
LEAST = 4
#: prefill tokens that every step may take
LEAST_PREFILL = 16
#: step sizes, in tokens, that are timed at start
TIMED_TOKENS = (1, 4, 8, 16, 32, 64, 128)
#: most runs of each size; two that differ by less than this share are enough
REPEATS, SAME = 4, 0.1
#: seconds of a step after which larger ones are not warmed up, as a start should be short
LONG = 0.1
#: if a step of at least the first number of tokens is LONG, and takes this many times as long as the smallest, larger
#: ones are not timed: clients never request such trees; the curve is extrapolated linearly
DEAR_TOKENS, DEAR = 64, 4.0
#: the same tokens by several sessions as by one: the difference is the cost of a session
SHARING, SHARED_TOKENS = 8, 32
#: step sizes that are also timed after a long context, and its tokens: a row costs more there
FAR_TOKENS, FAR = (1, 4), 1024
#: weight of the newest observation
SMOOTHING = 0.1
#: longest possible step of a verifier, in seconds
LONGEST_STEP = 60.0
#: longer pauses between a verdict and the next tree are the user's, not the network's
LONGEST_PAUSE = 2.0


def measure_costs(
    runner: ModelRunner,
    rows: int,
    timed: Sequence[int] = TIMED_TOKENS,
    clock: Callable[[], float] = time.perf_counter,
    *,
    context: int = 0,
) -> StepCosts:
    """Time steps of a verifier that does not serve yet. This overwrites the first pool rows.

    rows: of the pool. context: tokens of the longest text; if it is too short for `FAR`, the cost of a context is not
    timed.

    Each size counts with its fastest run of several, taken in turns until two of them agree, and never with more than a
    larger step took: a disturbance only ever adds time, and one that hit a single size would make trees or single
    tokens look expensive for as long as the verifier runs. Sizes after an expensive one (`DEAR`) are left out.
    """
    timed = [tokens for tokens in timed if tokens <= rows] or [1]
    past = min(GRANULE, rows - max(timed))
    steps = [[_part(0, past, tokens)] for tokens in timed]
    if shared := rows >= SHARING * 2 * GRANULE:
        steps.append([_part(2 * GRANULE * i, past, SHARED_TOKENS // SHARING) for i in range(SHARING)])
    if distant := min(rows, context) >= FAR + max(FAR_TOKENS):
        steps += [[_part(0, FAR, tokens)] for tokens in FAR_TOKENS]
    runs: list[list[float]] = [[] for _ in steps]  # seconds, the fastest first

    def needless(size: int) -> bool:
        smaller = zip(timed[:size], runs[:size], strict=True) if size < len(timed) else ()
        known = [seconds[0] for tokens, seconds in smaller if tokens >= DEAR_TOKENS and seconds]
        return any(seconds > max(LONG, DEAR * runs[0][0]) for seconds in known)

    for turn in range(1 + REPEATS):
        took = 0.0
        for size, (seconds, parts) in enumerate(zip(runs, steps, strict=True)):
            settled = len(seconds) > 1 and seconds[1] < (1 + SAME) * seconds[0]
            if settled or (not turn and took > LONG) or needless(size):
                continue
            took = _timed(runner, parts, past, clock)
            if turn:  # the first one warms up
                seconds.append(took)
                seconds.sort()
    runner.rest()
    runner.forward(steps[0])  # the small step that gives back the memory of the large ones
    kept = [size for size in range(len(timed)) if runs[size] and not needless(size)]
    curve = fastest_curve({timed[size]: runs[size][0] for size in kept})
    more = runs[len(timed)][0] - curve.at(SHARED_TOKENS) if shared else 0.0
    return StepCosts(curve, max(0.0, more) / (SHARING - 1), *(_context_costs(curve, runs) if distant else ()))


def _context_costs(curve: CostCurve, runs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return StepCosts' context and token_context, from the last runs."""
    (few, many), (first, second) = FAR_TOKENS, (seconds[0] for seconds in runs[-len(FAR_TOKENS) :])
    added = max(0.0, first - curve.at(few))
    each = max(0.0, second - curve.at(many) - added) / (many - few)
    return max(0.0, added - few * each), each


def timed_step(runner: ModelRunner, base: int, past: int, tokens: int, clock: Callable[[], float]) -> float:
    """Time a step of `tokens` tokens after `past` others, in free pool rows from `base`, in seconds."""
    return _timed(runner, [_part(base, past, tokens)], past, clock)


def _timed(runner: ModelRunner, parts: Sequence[Part], past: int, clock: Callable[[], float]) -> float:
    begun = clock()
    logits = runner.forward(parts)
    logits.draw([sum(map(len, parts)) - 1], [Sampling()], [past])  # waits for the device
    return clock() - begun


def fastest_curve(fastest: dict[int, float]) -> CostCurve:
    """Return seconds by tokens, ascending; no size counts with more than a larger step took."""
    seconds = list(fastest.values())
    return CostCurve(tuple(fastest), tuple(min(seconds[size:]) for size in range(len(seconds))))


def _part(base: int, past: int, tokens: int) -> Part:
    return Part(base, past, (0,), TokenTree.chain([0] * (tokens - 1)), True)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step by its tokens and sessions. curve: of steps of one session with few tokens before."""

    curve: CostCurve
    session: float = 0.0  # seconds that each further session adds to a step of as many tokens
    context: float = 0.0  # seconds that `FAR` tokens before it add to a step
    token_context: float = 0.0  # and to each of its tokens

    def at(self, tokens: float, sessions: float = 1.0, past: float = 0.0) -> float:
        """Return the seconds of a step of `tokens` tokens that `sessions` sessions share, behind `past` tokens each."""
        behind = past / FAR * (self.context + self.token_context * tokens)
        return self.curve.at(tokens) + self.session * max(0.0, sessions - 1.0) + behind

    @property
    def plausible(self) -> bool:
        """Return whether `measure_costs` can have measured this: files may hold anything."""
        tokens, seconds = self.curve.tokens, self.curve.seconds
        added = (self.session, self.context, self.token_context)
        return (
            0 < len(tokens) == len(seconds)
            and list(tokens) == sorted(set(tokens) & set(TIMED_TOKENS))
            and list(seconds) == sorted(seconds)
            and all(0 < each <= LONGEST_STEP for each in seconds)
            and all(0 <= each <= LONGEST_STEP for each in added)
        )

    def shared(self, sessions: float) -> CostCurve:
        """Return the curve of steps that `sessions` sessions share."""
        return CostCurve(self.curve.tokens, tuple(self.at(tokens, sessions) for tokens in self.curve.tokens))


@dataclass
class TreeBudget:
    """The tree size at which sessions like the present ones commit most tokens per second.

    A session's cycle is its pause (round-trip time, drafting, queue) and a step that `sessions` trees share. It commits
    tau(n) = 1 + gain * log2(1 + n) tokens with n nodes, as measured with drafters (tau 2.7, 3.1, 3.5, 3.9 at 8, 16, 32,
    64 nodes), with the gain learnt from verdicts. Without costs the budget is always `limit`.
    """

    limit: int
    costs: StepCosts | None = None
    slowdown: float = 1.0  # duration of steps as a multiple of `costs`, smoothed
    sessions: float = 1.0  # trees per step, smoothed
    pause: float = 0.05  # seconds between a verdict and the session's next tree, smoothed
    gain: float = 0.5
    nodes: int = field(init=False)

    def __post_init__(self) -> None:
        self.choose()

    def observe_step(self, sizes: Sequence[int], accepted: int) -> None:
        """Note that a step verified trees of these sizes and accepted this many of their nodes."""
        if not sizes:
            return
        self.sessions += SMOOTHING * (len(sizes) - self.sessions)
        if levels := sum(log2(1 + size) for size in sizes):
            self.gain += SMOOTHING * (accepted / levels - self.gain)
        self.choose()

    def observe_seconds(self, tokens: int, sessions: int, past: float, seconds: float) -> None:
        """Note the duration of a step of `tokens` tokens, shared by `sessions` sessions after `past` tokens each."""
        if self.costs is None or not 0 < tokens <= 2 * self.costs.curve.tokens[-1]:
            return
        found = seconds / self.costs.at(tokens, sessions, past)
        found = min(max(found, self.slowdown / 2), 2 * self.slowdown)  # a single disturbance changes little
        self.slowdown += SMOOTHING * (found - self.slowdown)

    def seconds(self, tokens: float, sessions: float = 1.0) -> float:
        """Return the present seconds of a step of `tokens` tokens. There must be costs."""
        assert self.costs is not None
        return self.slowdown * self.costs.at(tokens, sessions)

    def observe_pause(self, seconds: float) -> None:
        """Note the time from a session's verdict to its next tree."""
        if seconds < LONGEST_PAUSE:
            self.pause += SMOOTHING * (seconds - self.pause)

    def advertised(self) -> CostCurve | None:
        """Return the cost curve to advertise: of steps shared by as many sessions as at present."""
        if self.costs is None:
            return None
        curve = self.costs.shared(self.sessions)
        return CostCurve(curve.tokens, tuple(self.slowdown * seconds for seconds in curve.seconds))

    def prefill_room(self, tokens: int, limit: int) -> int:
        """Return the prefill tokens that may join a step of `tokens` verified ones: as many as at most double its time.

        So a long prompt delays other sessions' verdicts no more than that, however slow the target is here.
        """
        if self.costs is None or not tokens:
            return limit
        alone = partial(self.costs.at, sessions=self.sessions)
        longest, low, high = 2 * alone(tokens), min(LEAST_PREFILL, limit), limit
        while low < high:  # find the largest that fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if alone(tokens + middle) <= longest else (low, middle - 1)
        return low

    def worth_adding(
        self,
        chances: Sequence[float],
        tokens: int,
        committed: float,
        sessions: int,
        past: float = 0.0,
        slack: float = math.inf,
    ) -> int:
        """Return how many further tokens, likeliest first, make a step commit most tokens per second; 0 without costs.

        chances: that each of them is committed. Without them the step runs `tokens` tokens for `sessions` sessions and
        commits `committed`. past: tokens before it, on average over these sessions. slack: share by which it may take
        longer.
        """
        if self.costs is None or not chances:
            return 0
        without = self.costs.at(tokens, sessions, past)
        best, highest = 0, committed / without
        for count, chance in enumerate(chances, 1):
            committed += chance
            seconds = self.costs.at(tokens + count, sessions, past)
            if seconds > (1 + slack) * without:
                break
            if (rate := committed / seconds) > highest:
                best, highest = count, rate
        return best

    def tau(self, nodes: int) -> float:
        """Return the tokens expected from one verify of this many nodes."""
        return 1 + max(self.gain, 0.05) * log2(1 + nodes)

    def choose(self) -> None:
        """Set `nodes` from the measurements."""
        if self.costs is None:
            self.nodes = self.limit
            return
        sizes = [size for size in SIZES if LEAST <= size < self.limit] + [self.limit]

        def rate(size: int) -> float:
            return self.tau(size) / (self.pause + self.seconds(self.sessions * (1 + size), self.sessions))

        self.nodes = max(sizes, key=rate)
