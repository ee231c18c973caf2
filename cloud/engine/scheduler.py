"""What the next step runs: which sessions take part, with how much of their trees and prompts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace

from cloud.engine.colocated import Colocated
from cloud.engine.fair_shares import fair_shares
from cloud.engine.features import STREAMED_ROWS
from cloud.engine.jobs import Job, PendingSession
from cloud.engine.kvpool import KVPool
from cloud.engine.prefixes import Prefixes
from cloud.engine.stream_lookup import SUREST, StreamLookup, likeliest
from cloud.engine.tree_budget import TreeBudget
from outrider_core.protocol.tree import MAX_NODES, TokenTree
from outrider_core.protocol.wire import Generate, Verify

#: most tokens of one step, all sessions together, so that logits stay bounded; the rest wait for the next step
STEP_TOKENS = 1024
#: tokens that a GENERATE must have left for its text to be searched
WORTH_A_SEARCH = 4
#: share by which a step may take longer for what one account's texts foretell, where others wait for it too
OTHERS_WAIT = 0.1
#: after a verdict, seconds for which the session is expected to send its next tree
RECENT_SECONDS = 1.0


@dataclass(frozen=True)
class ScheduledSession:
    """A session's part of the next step: `chain` committed tokens, then `tree` (None: its round is not due yet).

    prefill: tokens of the chain that are prefill. drafted: a drafter proposes this round's trees, so their nodes count.
    """

    pending: PendingSession
    chain: int
    prefill: int
    tree: TokenTree | None
    drafted: bool = False

    def __len__(self) -> int:
        return self.chain + (len(self.tree) if self.tree is not None else 0)

    @property
    def rows_wanted(self) -> bool:
        """Whether the tokens' feature rows are sent, or read by the drafter beside the target."""
        job = self.pending.round
        if self.pending.opening is not None or job is None or self.drafted:
            return True
        if not isinstance(job.request, Generate) or not job.request.rows:
            return False
        last = self.pending.generated + 1 + len(self.tree or ()) >= job.request.max_new
        return last or len(self.pending.session.tokens) - self.pending.session.rows_due >= STREAMED_ROWS


class Scheduler:
    """Shares a step among the sessions that wait.

    fixed_budget: nodes per tree whatever steps cost; 0: what `budget` says. colocated: drafts for GENERATE; None: the
    target decodes it alone, but for what its text foretells: `lookup` makes what finds that for a GENERATE, where steps
    are timed. prefixes: of each account; None: every session runs its own.
    """

    def __init__(
        self,
        pool: KVPool,
        budget: TreeBudget,
        prefill_chunk: int,
        fixed_budget: int = 0,
        colocated: Colocated | None = None,
        prefixes: Prefixes | None = None,
        *,
        max_context: int,
        lookup: Callable[[], StreamLookup] | None = None,
    ) -> None:
        self.budget, self._colocated, self._fixed_budget = budget, colocated, fixed_budget
        self._prefixes, self._max_context = prefixes, max_context
        self._lookup = lookup if colocated is None else None
        self._pool, self._prefill_chunk = pool, prefill_chunk
        self._last_round = 0.0

    @property
    def tree_budget(self) -> int:
        """Nodes per tree that devices are asked to stay within."""
        return self._fixed_budget or self.budget.nodes

    def schedule(self, waiting: Sequence[PendingSession]) -> list[ScheduledSession]:
        """The next step for sessions with the oldest claim on the pool first.

        Verifies come first, the longest waiting first; prefill shares what a chunk may take beside them. A session
        never loses its rows to one with a younger claim.
        """
        later = self._prefixes.share(waiting) if self._prefixes else set[PendingSession]()
        missing = {pending: self._missing(pending) for pending in waiting}
        by_age = sorted(waiting, key=lambda pending: pending.waiting_since)
        ready = [pending for pending in by_age if pending.round is not None and not missing[pending]]
        behind = [pending for pending in by_age if missing[pending] and pending not in later]
        kept = min(self._prefill_chunk, STEP_TOKENS // 4) if behind else 0  # however many trees wait, prefill goes on
        for pending in behind:
            pending.lookup = None  # it holds as much memory as keys and values that were evicted
        parts = self._verifies(ready[: STEP_TOKENS - kept], STEP_TOKENS - kept)
        parts += self._prefills(behind, missing, parts)
        by_session = {part.pending: part for part in parts}
        scheduled, held = list[ScheduledSession](), set[bytes]()
        for pending in waiting:
            held.add(pending.session.id)
            part = by_session.get(pending)
            if part is None and pending.opening is not None and not missing[pending]:
                part = self._part(pending, 0, 0, None)  # its tokens have all run, its feature rows are still to come
            if part is not None and not self._admissible(part, held) and part.tree and not part.drafted:
                part = replace(part, tree=TokenTree())  # without what lookup adds
            if part is not None and self._admissible(part, held):
                scheduled.append(part)
        return scheduled

    def observe(self, sizes: Sequence[int], accepted: int) -> None:
        """A step verified drafted trees of these sizes and accepted this many nodes of all of them together."""
        if sizes:
            self._last_round = time.perf_counter()
        self.budget.observe_step(sizes, accepted)

    def _missing(self, pending: PendingSession) -> int:
        """Committed tokens that must run before the root can."""
        return len(pending.session.tokens) - 1 - self._pool.used(pending.session.id)

    def _part(self, pending: PendingSession, chain: int, prefill: int, tree: TokenTree | None) -> ScheduledSession:
        drafted = pending.round is not None and self._is_drafted(pending.round)
        return ScheduledSession(pending, chain, prefill, tree, drafted)

    def _is_drafted(self, job: Job) -> bool:
        return isinstance(job.request, Verify) or self._colocated is not None

    def _verifies(self, ready: list[PendingSession], room: int) -> list[ScheduledSession]:
        """Rounds whose rows are all there, their trees pruned to fair shares of the budget. Pruning is lossless.

        Streams have what the trees leave of it for what their texts foretell.
        """
        trees = [self._tree(pending) for pending in ready]
        capacity = min(self.tree_budget * len(ready), room - len(ready))
        shares = fair_shares([pending.account for pending in ready], [len(tree) for tree in trees], capacity)
        trees = [tree.pruned(share, MAX_NODES) for tree, share in zip(trees, shares, strict=True)]
        if self._lookup is not None and self.budget.costs is not None:
            trees = self._looked_up(ready, trees, capacity - sum(shares), self._lookup)
        return [self._part(pending, 1, 0, tree) for pending, tree in zip(ready, trees, strict=True)]

    def _looked_up(
        self, ready: list[PendingSession], trees: list[TokenTree], room: int, lookup: Callable[[], StreamLookup]
    ) -> list[TokenTree]:
        """The trees, and for streams what their texts foretell, as far as it is worth its share of the step.

        What one account's texts foretell may not make the others wait much longer.
        """
        tokens, committed = sum(1 + len(tree) for tree in trees), sum(self.budget.tau(len(tree)) for tree in trees)
        past = sum(len(pending.session.tokens) for pending in ready) / max(1, len(ready))
        alone = len({pending.account for pending in ready}) < 2

        def worth(chances: Sequence[float]) -> int:
            slack = math.inf if alone else OTHERS_WAIT
            return self.budget.worth_adding(chances[:room], tokens, committed, len(ready), past, slack)

        if not worth([SUREST]):
            return trees
        guesses = [self._guesses(pending, lookup) for pending in ready]
        ranked = likeliest(guesses)
        taken = Counter(stream for _, stream in ranked[: worth([chance for chance, _ in ranked])])
        return [
            TokenTree.chain([token for token, _ in found[: taken[stream]]]) if found else tree
            for stream, (found, tree) in enumerate(zip(guesses, trees, strict=True))
        ]

    def _guesses(self, pending: PendingSession, lookup: Callable[[], StreamLookup]) -> list[tuple[int, float]]:
        """What the text of a GENERATE foretells, and how likely; nothing for a VERIFY."""
        job, text = pending.round, pending.session.tokens
        if job is None or not isinstance(job.request, Generate) or pending.token_by_token:
            return []
        left = min(job.request.max_new - pending.generated, self._max_context - len(text)) - 1
        if left < 1 or (pending.lookup is None and left < WORTH_A_SEARCH):
            return []
        pending.lookup = pending.lookup or lookup()
        return pending.lookup.guesses(text, min(left, self.tree_budget))

    def _prefills(
        self,
        behind: list[PendingSession],
        missing: dict[PendingSession, int],
        verifies: Sequence[ScheduledSession],
    ) -> list[ScheduledSession]:
        """Fair shares of a chunk for sessions that lack rows; a round whose session lacks none any more joins in."""
        room = STEP_TOKENS - sum(map(len, verifies))
        chunk = min(self._prefill_chunk, room, self.budget.prefill_room(self._delayed(verifies), room))
        demands = [missing[pending] for pending in behind]
        shares = fair_shares([pending.account for pending in behind], demands, chunk)
        if any(shares) and not shares[0]:  # the oldest claim may be the only one that the pool has room for
            shares[shares.index(max(shares))] -= 1
            shares[0] = 1
        room -= sum(shares)
        parts = []
        for pending, share in zip(behind, shares, strict=True):
            part = self._part(pending, share, share, None)
            if pending.round is not None and share == missing[pending] and room > 0:
                tree = self._tree(pending).pruned(min(room - 1, self.tree_budget), MAX_NODES)
                part = self._part(pending, share + 1, share, tree)
                room -= 1 + len(tree)
            if len(part):
                parts.append(part)
        return parts

    def _delayed(self, verifies: Iterable[ScheduledSession]) -> int:
        """Verified tokens that a prefill chunk delays: this step's, or those that will come while it runs."""
        tokens = sum(map(len, verifies))
        recently = time.perf_counter() - self._last_round < RECENT_SECONDS
        return tokens or (round(self.budget.sessions * (1 + self.budget.nodes)) if recently else 0)

    def _tree(self, pending: PendingSession) -> TokenTree:
        """The round's tree: the device's, or for GENERATE the co-located drafter's."""
        job = pending.round
        assert job is not None
        if self._colocated is None or not isinstance(job.request, Generate):
            return job.tree
        left = job.request.max_new - pending.generated
        return self._colocated.draft(pending.session, self.tree_budget).pruned(MAX_NODES, left - 1)

    def _admissible(self, part: ScheduledSession, held: Set[bytes]) -> bool:
        """Whether the pool can hold it without rows that `held` sessions own."""
        pending = part.pending
        if part.tree is not None and part.chain != self._missing(pending) + 1:
            return False  # a session with an older claim has just taken its rows
        session = pending.session.id
        return self._pool.reserve(session, self._pool.used(session) + len(part), held, pending.account)
