"""Acceptance: the target draws its own tokens; draft tokens that equal the draws are accepted."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import FINISH_EOS, FINISH_LENGTH, FINISH_NONE

#: (rows of the logits, sampling and absolute position of each) -> tokens
Draw = Callable[[list[int], list[Sampling], list[int]], list[int]]


class Walk(NamedTuple):
    """accepted: nodes from the root down; bonus: the target's token behind them; finish: FINISH_*."""

    accepted: list[int]
    bonus: int
    finish: int


@dataclass(frozen=True)
class Walker:
    """committed: tokens up to and including the root; row: the root's logits, node i's are row + 1 + i."""

    tree: TokenTree
    sampling: Sampling
    committed: int
    row: int


def walk_all(draw: Draw, walkers: Sequence[Walker], eos_ids: Container[int], max_context: int) -> list[Walk]:
    """Walk every tree from its root for as long as the drawn token is a child; the first that is none is the bonus.

    Level by level, all trees together, so that a level is one call of `draw`; only visited rows are asked for.
    A drawn end-of-answer token is always the bonus, and so is the one that makes the committed sequence
    `max_context` long.
    """
    paths: list[list[int]] = [[] for _ in walkers]
    ends: dict[int, tuple[int, int]] = {}
    going = list(range(len(walkers)))
    while going:
        nodes = [paths[index][-1] if paths[index] else ROOT for index in going]
        positions = [walkers[index].committed + len(paths[index]) for index in going]
        rows = [walkers[index].row + 1 + node for index, node in zip(going, nodes, strict=True)]
        tokens = draw(rows, [walkers[index].sampling for index in going], positions)
        on = list[int]()
        for index, node, position, token in zip(going, nodes, positions, tokens, strict=True):
            child = walkers[index].tree.child(node, token)
            if token in eos_ids:
                ends[index] = token, FINISH_EOS
            elif position + 1 >= max_context:
                ends[index] = token, FINISH_LENGTH
            elif child is None:
                ends[index] = token, FINISH_NONE
            else:
                paths[index].append(child)
                on.append(index)
        going = on
    return [Walk(path, *ends[index]) for index, path in enumerate(paths)]
