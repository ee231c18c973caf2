"""What the next step runs: which sessions take part, with how much of their trees and prompts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from cloud.colocated import Colocated
from cloud.fair_shares import fair_shares
from cloud.jobs import PendingSession
from cloud.kvpool import KVPool
from cloud.tree_budget import TreeBudget
from outrider_core.protocol.tree import MAX_NODES, TokenTree
from outrider_core.protocol.wire import Generate

#: tokens of one step, all sessions together; more wait for the next, so that logits stay bounded
STEP_TOKENS = 1024
#: sessions that got a verdict so lately are about to send the next tree
RECENT_SECONDS = 1.0


@dataclass(frozen=True)
class ScheduledSession:
    """A line's part of the next step: `chain` committed tokens, then `tree` (None: no round takes part)."""

    line: PendingSession
    chain: int
    prefill: int  # tokens of the chain that are prefill
    tree: TokenTree | None

    def __len__(self) -> int:
        return self.chain + (len(self.tree) if self.tree is not None else 0)


class Scheduler:
    """Shares a step among those who wait.

    fixed_budget: nodes per tree whatever steps cost; 0: what `budget` says. colocated: drafts for GENERATE; None: it
    goes token by token.
    """

    def __init__(
        self,
        pool: KVPool,
        budget: TreeBudget,
        prefill_chunk: int,
        fixed_budget: int = 0,
        colocated: Colocated | None = None,
    ) -> None:
        self.budget, self.colocated, self._fixed_budget = budget, colocated, fixed_budget
        self._pool, self._prefill_chunk = pool, prefill_chunk
        self._last_round = 0.0

    @property
    def tree_budget(self) -> int:
        """Nodes per tree that devices are asked to stay within."""
        return self._fixed_budget or self.budget.nodes

    def schedule(self, lines: Sequence[PendingSession]) -> list[ScheduledSession]:
        """The next step for lines with the oldest claim on the pool first.

        Verifies come first, the longest waiting first; prefill shares what a chunk may take beside them. A line
        never loses its rows to one with a younger claim.
        """
        missing = {line: self._missing(line) for line in lines}
        waiting = sorted(lines, key=lambda line: line.waiting_since)
        ready = [line for line in waiting if line.round is not None and not missing[line]]
        behind = [line for line in waiting if missing[line]]
        kept = min(self._prefill_chunk, STEP_TOKENS // 4) if behind else 0  # even trees without end leave this much
        works = self._verifies(ready[: STEP_TOKENS - kept], STEP_TOKENS - kept)
        works += self._prefills(behind, missing, works)
        by_line = {work.line: work for work in works}
        planned, held = list[ScheduledSession](), set[bytes]()
        for line in lines:
            held.add(line.session.id)
            work = by_line.get(line)
            if work is None and line.opening is not None and not missing[line]:
                work = ScheduledSession(line, 0, 0, None)  # its tokens are all there, its feature rows are not
            if work is not None and self._admissible(work, held):
                planned.append(work)
        return planned

    def observe(self, sizes: Sequence[int], accepted: int) -> None:
        """A step verified trees of these sizes and accepted so many nodes of all together."""
        if sizes:
            self._last_round = time.perf_counter()
        self.budget.observe_step(sizes, accepted)

    def _missing(self, line: PendingSession) -> int:
        """Committed tokens that must run before the root can."""
        return len(line.session.tokens) - 1 - self._pool.used(line.session.id)

    def _verifies(self, ready: list[PendingSession], room: int) -> list[ScheduledSession]:
        """Rounds whose rows are all there, their trees pruned to fair shares of the budget. Pruning is lossless."""
        trees = [self._tree(line) for line in ready]
        capacity = min(self.tree_budget * len(ready), room - len(ready))
        shares = fair_shares([line.owner for line in ready], [len(tree) for tree in trees], capacity)
        return [
            ScheduledSession(line, 1, 0, tree.pruned(share, MAX_NODES))
            for line, tree, share in zip(ready, trees, shares, strict=True)
        ]

    def _prefills(
        self, behind: list[PendingSession], missing: dict[PendingSession, int], verifies: Sequence[ScheduledSession]
    ) -> list[ScheduledSession]:
        """Fair shares of a chunk for the lines that lack rows; one that is through takes its round along."""
        room = STEP_TOKENS - sum(map(len, verifies))
        chunk = min(self._prefill_chunk, room, self.budget.prefill_room(self._delayed(verifies), room))
        shares = fair_shares([line.owner for line in behind], [missing[line] for line in behind], chunk)
        room -= sum(shares)
        works = []
        for line, share in zip(behind, shares, strict=True):
            work = ScheduledSession(line, share, share, None)
            if line.round is not None and share == missing[line] and room > 0:
                tree = self._tree(line).pruned(min(room - 1, self.tree_budget), MAX_NODES)
                work = ScheduledSession(line, share + 1, share, tree)
                room -= 1 + len(tree)
            if len(work):
                works.append(work)
        return works

    def _delayed(self, verifies: Iterable[ScheduledSession]) -> int:
        """Verified tokens that a prefill chunk delays: this step's, or those that will come while it runs."""
        tokens = sum(map(len, verifies))
        lately = time.perf_counter() - self._last_round < RECENT_SECONDS
        return tokens or (round(self.budget.sessions * (1 + self.budget.nodes)) if lately else 0)

    def _tree(self, line: PendingSession) -> TokenTree:
        """The round's tree: the device's, or for GENERATE the co-located drafter's."""
        job = line.round
        assert job is not None
        if self.colocated is None or not isinstance(job.request, Generate):
            return job.tree
        left = job.request.max_new - line.generated
        return self.colocated.draft(line.session, self.tree_budget).pruned(MAX_NODES, left - 1)

    def _admissible(self, work: ScheduledSession, held: Set[bytes]) -> bool:
        """Whether the pool has room for it without what others hold."""
        if work.tree is not None and work.chain != self._missing(work.line) + 1:
            return False  # a line with an older claim has just taken its rows
        session = work.line.session
        return self._pool.reserve(session.id, self._pool.used(session.id) + len(work), held, work.line.owner)
