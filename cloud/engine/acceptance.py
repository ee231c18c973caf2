"""Acceptance: the target draws its own tokens; draft tokens that equal the draws are accepted."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider_core.protocol.constraint import Adjustment, Rules
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import FINISH_EOS, FINISH_LENGTH, FINISH_NONE

#: what is drawn from logits that are not numbers (NaN, infinite), as of a number format that overflows, and where the
#: answer's constraint allows no token
NO_TOKEN = -1
#: (rows of the logits, sampling, absolute position and adjustment of each) -> tokens
Draw = Callable[[Sequence[int], Sequence[Sampling], Sequence[int], Sequence[Adjustment | None]], list[int]]
#: ids and natural log probabilities of a drawn token and of the likeliest in its place, before any sampling parameter
Chances = Sequence[tuple[int, float]]


class AcceptedPath(NamedTuple):
    """What the target accepts of a tree.

    accepted: nodes from the root down; bonus: the target's own token after them; finish: FINISH_*. chances: for each of
    these tokens, where they were asked for.
    """

    accepted: list[int]
    bonus: int
    finish: int
    chances: Sequence[Chances] = ()

    @property
    def failed(self) -> bool:
        """Whether nothing could be drawn somewhere on the path: nothing of it may be committed."""
        return self.bonus == NO_TOKEN


@dataclass(frozen=True)
class RootedTree:
    """A tree under verification.

    committed: number of tokens up to and including the root. row: index of the root's logits; node i's are row + 1 + i.
    rules: the answer's, at the root; they follow the walk.
    """

    tree: TokenTree
    sampling: Sampling
    committed: int
    row: int
    rules: Rules | None = None


def accept_paths(
    draw: Draw, drafts: Sequence[RootedTree], eos_ids: Container[int], max_context: int
) -> list[AcceptedPath]:
    """Descend each tree from its root while the drawn token is a child; the first draw that is not is the bonus token.

    All trees descend together, one call of `draw` per level, and only visited rows are drawn from. An end-of-answer
    token is always the bonus token, and so is the one that makes the committed sequence `max_context` long.
    """
    paths: list[list[int]] = [[] for _ in drafts]
    ends: dict[int, tuple[int, int]] = {}
    active = list(range(len(drafts)))
    while active:
        nodes = [paths[index][-1] if paths[index] else ROOT for index in active]
        positions = [drafts[index].committed + len(paths[index]) for index in active]
        rows = [drafts[index].row + 1 + node for index, node in zip(active, nodes, strict=True)]
        rules = [drafts[index].rules for index in active]
        adjustments = [each.adjustment() if each else None for each in rules]
        tokens = draw(rows, [drafts[index].sampling for index in active], positions, adjustments)
        for each, token in zip(rules, tokens, strict=True):
            if each and token != NO_TOKEN:
                each.advance(token)
        descending = list[int]()
        for index, node, position, token in zip(active, nodes, positions, tokens, strict=True):
            child = drafts[index].tree.child(node, token)
            if token in eos_ids:
                ends[index] = token, FINISH_EOS
            elif position + 1 >= max_context:
                ends[index] = token, FINISH_LENGTH
            elif child is None:
                ends[index] = token, FINISH_NONE
            else:
                paths[index].append(child)
                descending.append(index)
        active = descending
    return [AcceptedPath(path, *ends[index]) for index, path in enumerate(paths)]
