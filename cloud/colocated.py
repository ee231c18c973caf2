"""The drafter on the server: trees for GENERATE, drafted where they are verified.

This is the strongest competitor of drafting on the device: nothing travels between drafting and verifying. It runs the
device's own drafter code on the same feature rows, so that a comparison is about the place alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from cloud.sessions import Session, common_prefix
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.models.eager import EagerEngine
from outrider_core.models.moa import DeviceHalf
from outrider_core.protocol.rows import unpack_rows
from outrider_core.protocol.tree import TokenTree

#: drafting here costs the verifier's own time, so trees are never larger than a device's usual ones
NODES = 32


@dataclass
class _State:
    drafter: Drafter
    tokens: list[int] = field(default_factory=list)  # the text below which the last tree was drafted
    rows: int = 0  # feature rows that the drafter has


class Colocated:
    """Drafting state of every session that GENERATEs, dropped with the session."""

    def __init__(self, half: DeviceHalf, max_context: int) -> None:
        self._config, self._max_context = half.config, max_context
        self._engine = EagerEngine(half)
        self._draft_ids = half.draft_ids.cpu().numpy().astype(np.int64)
        null_row = half.null_row
        self._null_row = None if null_row is None else null_row.detach().float().cpu().numpy()
        self._states: WeakKeyDictionary[Session, _State] = WeakKeyDictionary()

    def draft(self, session: Session, nodes: int) -> TokenTree:
        """A tree of at most `nodes` nodes below the session's root."""
        state = self._states.get(session)
        if state is None:
            state = self._states[session] = _State(self._drafter(session))
        same = common_prefix(state.tokens, session.tokens)
        state.rows = min(state.rows, same)
        state.drafter.keep_rows(state.rows)
        if (stop := session.rows.stop) > state.rows:
            rows = unpack_rows(session.rows.block(state.rows, stop), session.rows.shape)
            state.drafter.add_rows(np.arange(state.rows, stop), rows)
            state.rows = stop
        state.tokens = list(session.tokens)
        return state.drafter.draft(state.tokens, session.sampling, TreeShape(nodes=max(1, min(nodes, NODES)))).tree

    def _drafter(self, session: Session) -> Drafter:
        config = self._config
        return Drafter(
            self._engine,
            self._draft_ids,
            session.rows.shape,
            config.sa_kv_heads,
            self._max_context,
            null_row=self._null_row,
        )
