"""A session's part of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloud.engine.kvpool import KVPool
from cloud.engine.sessions import SessionRecord
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.part import Part


@dataclass(frozen=True, eq=False)
class Segment(Part):
    """The `Part` that a session runs in a step: committed tokens without keys and values yet, then a tree.

    The tree hangs below the last committed token, which then must be the chain's last; a prefill chunk has no tree and
    is not `wanted`. features: bring the session's feature rows up to date.
    """

    session: SessionRecord = field(kw_only=True)
    features: bool = field(default=True, kw_only=True)

    @classmethod
    def of(
        cls, session: SessionRecord, pool: KVPool, chain: int, tree: TokenTree | None = None, features: bool = True
    ) -> Segment:
        """Take the next `chain` tokens of `session`, whose rows `pool` must hold, and `tree`; None: a prefill chunk."""
        extent = pool.extent(session.id)
        tokens = tuple(session.tokens[extent.used : extent.used + chain])
        drafted = TokenTree() if tree is None else tree
        sampling = session.sampling if session.rules is None else None
        wanted = tree is not None
        return cls(extent.base, extent.used, tokens, drafted, wanted, sampling, session=session, features=features)

    @property
    def prefill(self) -> int:
        """Number of prefill tokens in the chain: all but the root."""
        return len(self.chain) - self.wanted
