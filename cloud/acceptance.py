"""Acceptance: the target draws its own tokens; draft tokens that equal the draws are accepted."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import Sampling, draw
from protocol.tree import ROOT, TokenTree
from protocol.wire import FINISH_EOS, FINISH_LENGTH, FINISH_NONE


class Walk(NamedTuple):
    """accepted: nodes from the root down; bonus: the target's token behind them; finish: FINISH_*."""

    accepted: list[int]
    bonus: int
    finish: int


def walk(
    logits: Callable[[int], NDArray[np.floating]],
    tree: TokenTree,
    sampling: Sampling,
    committed: int,
    eos_ids: Container[int],
    max_context: int,
) -> Walk:
    """Walk from the root for as long as the drawn token is a child; the first that is none is the bonus.

    logits(0) are the root's [vocab], logits(i + 1) node i's; only visited ones are asked for. `committed`:
    tokens up to and including the root. A drawn end-of-answer token is always the bonus, and so is the one
    that makes the committed sequence `max_context` long.
    """
    node, accepted = ROOT, list[int]()
    while True:
        position = committed + len(accepted)
        token = draw(logits(node + 1), sampling, position)
        if token in eos_ids:
            return Walk(accepted, token, FINISH_EOS)
        if position + 1 >= max_context:
            return Walk(accepted, token, FINISH_LENGTH)
        child = tree.child(node, token)
        if child is None:
            return Walk(accepted, token, FINISH_NONE)
        node = child
        accepted.append(node)
