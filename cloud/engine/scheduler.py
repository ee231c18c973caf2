"""Compose the next step: the sessions that take part, with how much of their trees and prompts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set

from cloud.engine.fair_shares import fair_shares
from cloud.engine.features import STREAMED_ROWS
from cloud.engine.kvpool import KVPool
from cloud.engine.prefixes import Prefixes
from cloud.engine.segment import Segment
from cloud.engine.sessions import SessionRecord
from cloud.engine.step_pace import StepPace
from cloud.engine.stream_lookup import SUREST, StreamLookup, likeliest
from cloud.engine.tree_budget import TreeBudget
from outrider_core.protocol.tree import MAX_NODES, TokenTree
from outrider_core.protocol.wire import Generate

#: most tokens of one step, all sessions together, so that logits stay bounded; the rest wait for the next step
STEP_TOKENS = 1024
#: most prompt tokens of one step, all sessions together; fewer if they are slow or others wait for verdicts
PREFILL_CHUNK = 512
#: tokens that a GENERATE must have left for lookup to be used
WORTH_A_SEARCH = 4
#: share by which a step may take longer for guesses of one account, if others wait for it too
OTHERS_WAIT = 0.1
#: seconds after a verdict in which the session's next tree is expected
RECENT_SECONDS = 1.0


class Scheduler:
    """Shares a step among the sessions that wait.

    prefill_chunk: most prompt tokens of one step. fixed_budget: nodes per tree whatever steps cost; 0: from `budget`.
    prefixes: of each account; None: every session runs its own. lookup: makes the lookup of a GENERATE, if steps are
    timed; None: a token a step.
    """

    def __init__(
        self,
        pool: KVPool,
        budget: TreeBudget,
        *,
        max_context: int,
        fixed_budget: int = 0,
        prefixes: Prefixes | None = None,
        lookup: Callable[[], StreamLookup] | None = None,
    ) -> None:
        self.budget, self._fixed_budget = budget, fixed_budget
        self._prefixes, self._max_context, self._lookup = prefixes, max_context, lookup
        self._pool, self.prefill_chunk, self.pace = pool, PREFILL_CHUNK, StepPace(budget)
        self._last_round = 0.0

    @property
    def tree_budget(self) -> int:
        """The tree budget to advertise, in nodes per tree."""
        return self._fixed_budget or self.budget.nodes

    def schedule(self, waiting: Sequence[SessionRecord], maskless: Set[SessionRecord] = frozenset()) -> list[Segment]:
        """Return the next step for `waiting` sessions, the oldest claim on the pool first.

        Verifies come first, the longest waiting first; prefill shares what a chunk may take beside them. A session
        never loses its rows to one with a younger claim. maskless: sessions that skip the step, as they wait for masks.
        """
        later = self._prefixes.share(waiting, maskless) if self._prefixes else set[SessionRecord]()
        free = [session for session in waiting if session not in maskless]
        missing = {session: self._missing(session) for session in free}
        for session in waiting:
            if session.round is not None and (session in maskless or missing[session]):
                session.round.unready = True
        by_age = sorted(free, key=lambda session: session.waiting_since)
        ready = [session for session in by_age if session.round is not None and not missing[session]]
        behind = [session for session in by_age if missing[session] and session not in later]
        kept = min(self.prefill_chunk, STEP_TOKENS // 4) if behind else 0  # prefill continues however many trees wait
        for session in behind:
            if session.round is not None:
                session.round.lookup = None  # it holds as much memory as evicted keys and values
        trees = self._verifies(ready[: STEP_TOKENS - kept], STEP_TOKENS - kept)
        chunks, joining = self._prefills(behind, missing, sum(1 + len(tree) for tree in trees.values()))
        trees |= joining
        segments, held = list[Segment](), set[bytes]()
        for session in waiting:
            held.add(session.id)
            if session in maskless:
                continue
            chunk, tree = chunks.get(session, 0), trees.get(session)
            if not chunk and tree is None and (session.opening is None or missing[session]):
                continue  # else its tokens have all run, and only its feature rows are missing
            if tree and not session.is_drafted and not self._admissible(session, chunk, tree, held):
                tree = TokenTree()  # without lookup's guesses
            if self._admissible(session, chunk, tree, held):
                chain = chunk + (tree is not None)
                segments.append(Segment.of(session, self._pool, chain, tree, _rows_wanted(session, tree)))
        return segments

    def propose(self, session: SessionRecord) -> TokenTree:
        """Return the tree of the session's round: the device's; an empty one for a GENERATE."""
        assert session.round is not None
        return session.round.tree

    def observe(self, sizes: Sequence[int], accepted: int) -> None:
        """Note that a step verified drafted trees of these sizes and accepted this many of their nodes."""
        if sizes:
            self._last_round = time.perf_counter()
        self.budget.observe_step(sizes, accepted)

    def observe_seconds(self, segments: Sequence[Segment], seconds: float) -> None:
        """Note the duration of a step of these segments."""
        tokens = sum(map(len, segments))
        past = sum(segment.past for segment in segments) / len(segments)
        self.budget.observe_seconds(tokens, len(segments), past, seconds)
        self.pace.observe(tokens, seconds)

    def _missing(self, session: SessionRecord) -> int:
        """Return the number of committed tokens that must run before the root can."""
        return len(session.tokens) - 1 - self._pool.used(session.id)

    def _verifies(self, ready: list[SessionRecord], room: int) -> dict[SessionRecord, TokenTree]:
        """Return rounds whose rows are all there, with trees pruned to fair shares of the budget. Pruning is lossless.

        Streams get the rest of the budget for lookup's guesses.
        """
        trees = [self.propose(session) for session in ready]
        capacity = min(self.tree_budget * len(ready), room - len(ready))
        shares = fair_shares([session.account for session in ready], [len(tree) for tree in trees], capacity)
        trees = [tree.pruned(share, MAX_NODES) for tree, share in zip(trees, shares, strict=True)]
        if self._lookup is not None and self.budget.costs is not None:
            trees = self._looked_up(ready, trees, capacity - sum(shares), self._lookup)
        return dict(zip(ready, trees, strict=True))

    def _looked_up(
        self, ready: list[SessionRecord], trees: list[TokenTree], room: int, lookup: Callable[[], StreamLookup]
    ) -> list[TokenTree]:
        """Return the trees, and for streams lookup's guesses that are worth their share of the step.

        Guesses of one account must not delay the others much.
        """
        tokens, committed = sum(1 + len(tree) for tree in trees), sum(self.budget.tau(len(tree)) for tree in trees)
        past = sum(len(session.tokens) for session in ready) / max(1, len(ready))
        alone = len({session.account for session in ready}) < 2

        def worth(chances: Sequence[float]) -> int:
            slack = math.inf if alone else OTHERS_WAIT
            return self.budget.worth_adding(chances[:room], tokens, committed, len(ready), past, slack)

        if not worth([SUREST]):
            return trees
        guesses = [self._guesses(session, lookup) for session in ready]
        ranked = likeliest(guesses)
        taken = Counter(stream for _, stream in ranked[: worth([chance for chance, _ in ranked])])
        return [
            TokenTree.chain([token for token, _ in found[: taken[stream]]]) if found else tree
            for stream, (found, tree) in enumerate(zip(guesses, trees, strict=True))
        ]

    def _guesses(self, session: SessionRecord, lookup: Callable[[], StreamLookup]) -> list[tuple[int, float]]:
        """Return lookup's guesses for a GENERATE, with their probabilities; none for a VERIFY."""
        request, text = session.round, session.tokens
        if request is None or not isinstance(request.message, Generate) or request.token_by_token:
            return []
        left = min(request.message.max_new - request.generated, self._max_context - len(text)) - 1
        if left < 1 or (request.lookup is None and left < WORTH_A_SEARCH):
            return []
        request.lookup = request.lookup or lookup()
        return request.lookup.guesses(text, min(left, self.tree_budget))

    def _prefills(
        self, behind: list[SessionRecord], missing: dict[SessionRecord, int], verified: int
    ) -> tuple[dict[SessionRecord, int], dict[SessionRecord, TokenTree]]:
        """Return fair shares of a chunk for sessions that lack rows, beside `verified` tokens of other sessions.

        A round whose session then lacks none joins the step with its tree.
        """
        room = STEP_TOKENS - verified
        most = self.pace.chunk(min(self.prefill_chunk, room))
        chunk = min(most, self.budget.prefill_room(self._delayed(verified), room))
        demands = [missing[session] for session in behind]
        shares = fair_shares([session.account for session in behind], demands, chunk)
        if any(shares) and not shares[0]:  # the pool may have room for the oldest claim alone
            shares[shares.index(max(shares))] -= 1
            shares[0] = 1
        room -= sum(shares)
        chunks, trees = dict(zip(behind, shares, strict=True)), dict[SessionRecord, TokenTree]()
        for session in behind:
            if session.round is not None and chunks[session] == missing[session] and room > 0:
                trees[session] = self.propose(session).pruned(min(room - 1, self.tree_budget), MAX_NODES)
                room -= 1 + len(trees[session])
        return chunks, trees

    def _delayed(self, verified: int) -> int:
        """Return the verified tokens that a prefill chunk delays: this step's, or those that arrive while it runs."""
        recently = time.perf_counter() - self._last_round < RECENT_SECONDS
        return verified or (round(self.budget.sessions * (1 + self.budget.nodes)) if recently else 0)

    def _admissible(self, session: SessionRecord, chunk: int, tree: TokenTree | None, held: Set[bytes]) -> bool:
        """Return whether the pool can hold `chunk` tokens, the root and its tree, without rows of `held` sessions."""
        if tree is not None and chunk != self._missing(session):
            return False  # a session with an older claim has just taken its rows
        size = chunk + (0 if tree is None else 1 + len(tree))
        return self._pool.reserve(session.id, self._pool.used(session.id) + size, held, session.account)


def _rows_wanted(session: SessionRecord, tree: TokenTree | None) -> bool:
    """Return whether feature rows are updated: they are sent, or a drafter reads them."""
    request = session.round
    if session.opening is not None or request is None or request.is_drafted:
        return True
    if not isinstance(request.message, Generate) or not request.message.rows:
        return False
    last = request.generated + 1 + len(tree or ()) >= request.message.max_new
    return last or len(session.tokens) - session.rows_due >= STREAMED_ROWS
