"""The drafter on the server: trees for GENERATE, drafted where they are verified.

This is the strongest competitor of drafting on the device: nothing travels between drafting and verifying. It runs the
device's own drafter code on the same feature rows, so that a comparison is about the place alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from cloud.engine.sessions import Session
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.protocol.prefix import common_prefix
from outrider_core.protocol.rows import RowShape, unpack_rows
from outrider_core.protocol.tree import TokenTree

#: drafting here costs the verifier's own time, so trees are never larger than a device's usual ones
NODES = 32


@dataclass
class _State:
    drafter: Drafter
    tokens: list[int] = field(default_factory=list)  # the text below which the last tree was drafted
    rows: int = 0  # feature rows that the drafter has


class Colocated:
    """Drafting state of every session that GENERATEs, dropped with the session. open_drafter: for rows of a shape."""

    def __init__(self, open_drafter: Callable[[RowShape], Drafter]) -> None:
        self._open_drafter = open_drafter
        self._states: WeakKeyDictionary[Session, _State] = WeakKeyDictionary()

    def draft(self, session: Session, nodes: int) -> TokenTree:
        """A tree of at most `nodes` nodes below the session's root."""
        state = self._states.get(session)
        if state is None:
            state = self._states[session] = _State(self._open_drafter(session.rows.shape))
        same = common_prefix(state.tokens, session.tokens)
        state.rows = min(state.rows, same)
        state.drafter.keep_rows(state.rows)
        if (stop := session.rows.stop) > state.rows:
            rows = unpack_rows(session.rows.block(state.rows, stop), session.rows.shape)
            state.drafter.add_rows(np.arange(state.rows, stop), rows)
            state.rows = stop
        state.tokens = list(session.tokens)
        return state.drafter.draft(state.tokens, session.sampling, TreeShape(nodes=max(1, min(nodes, NODES)))).tree
