"""Acceptance: the target draws its own tokens; draft tokens that equal the draws are accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, cast

from cloud.engine.masks import FollowedRules
from outrider_core.protocol.constraint import Adjustment
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import FINISH_EOS, FINISH_LENGTH, FINISH_NONE

#: stands for a draw from logits that are not numbers (NaN, infinite), as after an overflow, or without any allowed
#: token
NO_TOKEN = -1
#: (rows of the logits, sampling, absolute position and adjustment of each) -> tokens
Draw = Callable[[Sequence[int], Sequence[Sampling], Sequence[int], Sequence[Adjustment | None]], list[int]]
#: ids and natural log probabilities of a drawn token and of the likeliest at its place, before sampling parameters
Chances = Sequence[tuple[int, float]]


class Late(Enum):
    """The adjustment of a draw is not ready in time."""

    LATE = "late"


LATE = Late.LATE


class AcceptedPath(NamedTuple):
    """The part of a tree that the target accepts.

    accepted: nodes from the root down; bonus: the target's own token after them; finish: FINISH_*. chances: of each of
    these tokens, if requested.
    """

    accepted: list[int]
    bonus: int
    finish: int
    chances: Sequence[Chances] = ()

    @property
    def failed(self) -> bool:
        """Return whether some draw on the path failed, so that nothing of it may be committed."""
        return self.bonus == NO_TOKEN


@dataclass(frozen=True)
class RootedTree:
    """A tree under verification.

    committed: number of tokens up to and including the root. row: index of the root's logits; node i's are row + 1 + i.
    rules: the answer's, which follow the walk; text: the tokens up to and including the root, if there are rules.
    """

    tree: TokenTree
    sampling: Sampling
    committed: int
    row: int
    rules: FollowedRules | None = None
    text: Sequence[int] = ()


def accept_paths(
    draw: Draw, drafts: Sequence[RootedTree], eos_ids: Container[int], max_context: int, until: float = math.inf
) -> list[AcceptedPath | None]:
    """Descend each tree from its root while the drawn token is a child; the first draw that is not is the bonus token.

    All trees descend together, one call of `draw` per level, and only visited rows are drawn from. An end-of-answer
    token is always the bonus token, and so is the one that makes the committed sequence `max_context` long. If an
    adjustment is not ready by `until` (time.monotonic()), a path ends with the token before; at its root it is None.
    """
    paths: list[list[int]] = [[] for _ in drafts]
    ends: dict[int, tuple[int, int] | None] = {}
    active = list(range(len(drafts)))
    while active:
        adjustments = [_adjustment(drafts[index], paths[index], until) for index in active]
        for index, adjustment in zip(active, adjustments, strict=True):
            if adjustment is LATE:
                ends[index] = (drafts[index].tree.tokens[paths[index].pop()], FINISH_NONE) if paths[index] else None
        known = [each is not LATE for each in adjustments]
        active = [index for index, there in zip(active, known, strict=True) if there]
        adjustments = [each for each, there in zip(adjustments, known, strict=True) if there]
        nodes = [paths[index][-1] if paths[index] else ROOT for index in active]
        positions = [drafts[index].committed + len(paths[index]) for index in active]
        rows = [drafts[index].row + 1 + node for index, node in zip(active, nodes, strict=True)]
        samplings = [drafts[index].sampling for index in active]
        tokens = draw(rows, samplings, positions, cast("list[Adjustment | None]", adjustments)) if active else []
        descending = list[int]()
        for index, node, position, token in zip(active, nodes, positions, tokens, strict=True):
            draft, child = drafts[index], drafts[index].tree.child(node, token)
            if token in eos_ids:
                ends[index] = token, FINISH_EOS
            elif position + 1 >= max_context:
                ends[index] = token, FINISH_LENGTH
            else:
                if draft.rules and token != NO_TOKEN:  # for the next level, or the next step
                    draft.rules.begin([*draft.text, *(draft.tree.tokens[each] for each in paths[index]), token])
                if child is None:
                    ends[index] = token, FINISH_NONE
                else:
                    paths[index].append(child)
                    descending.append(index)
        active = descending
    return [AcceptedPath(path, *end) if (end := ends[index]) else None for index, path in enumerate(paths)]


def _adjustment(draft: RootedTree, path: Sequence[int], until: float) -> Adjustment | Late | None:
    """Return the adjustment of the draw after a path; None if there are no rules."""
    if draft.rules is None:
        return None
    return draft.rules.take([*draft.text, *(draft.tree.tokens[node] for node in path)], until) or LATE
