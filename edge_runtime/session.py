"""One answer as a pure state machine: events in, actions out. No I/O, no threads, no clock.

`committed` tokens were drawn by the target (or are the prompt); `provisional` tokens behind them were
written by the drafter while the link was silent. The text a user sees is committed + provisional.

One rule covers late verdicts, catching up after an outage and the normal round. A verdict commits the
accepted path and the bonus token. If these agree with the provisional tokens, the agreeing part becomes
verified; at the first difference the provisional rest is rolled back (`repair`). While provisional tokens
remain, the next VERIFY is the chain of them instead of a drafted tree.

Times are seconds on any monotonic clock, handed in with each event.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protocol.rows import RowShape, unpack_rows
from protocol.sampling import Sampling
from protocol.tree import MAX_NODES, TokenTree
from protocol.wire import (
    ERR_BUSY,
    ERR_GOING_AWAY,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    FINISH_NONE,
    ClientMessage,
    Error,
    Features,
    Open,
    Opened,
    Resync,
    ServerMessage,
    Verdict,
    Verify,
    Welcome,
    pack_ids,
    pack_tree,
)

# --- actions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Give `message` to the link."""

    message: ClientMessage


@dataclass(frozen=True)
class DraftTree:
    """Grow a tree of at most `nodes` nodes and `depth` levels below `prefix`.

    Answer with `Session.tree_ready(tree, version)`. depth may be 0: only the bonus token is wanted.
    """

    prefix: list[int]
    version: int
    nodes: int
    depth: int


@dataclass(frozen=True)
class WriteToken:
    """Let the drafter write one token behind `prefix`; answer with `Session.token_written(token, version)`."""

    prefix: list[int]
    version: int


@dataclass(frozen=True)
class AddRows:
    """Feature rows [n, 2, heads, head_dim] of tokens at `positions` [n], which the drafter has not seen yet."""

    positions: NDArray[np.int64]
    rows: NDArray[np.float32]


@dataclass(frozen=True)
class Commit:
    """`tokens` are the target's; the first `confirmed` of them stood there as provisional already."""

    tokens: list[int]
    confirmed: int


@dataclass(frozen=True)
class Provide:
    """The drafter wrote `token` on its own."""

    token: int


@dataclass(frozen=True)
class RollBack:
    """The last `tokens` provisional tokens are withdrawn: the target draws otherwise."""

    tokens: list[int]


@dataclass(frozen=True)
class Stall:
    """Writing alone begins: the verdict is overdue or the link is down. `deadline`: when it was due."""

    deadline: float


@dataclass(frozen=True)
class Resume:
    """The target answers again."""


@dataclass(frozen=True)
class Reconnect:
    """The link has been silent for too long: close it and dial again."""


@dataclass(frozen=True)
class Done:
    """reason: "stop" (end of answer), "length", "unverified" (link never came back) or "cancelled"."""

    reason: str


Action = (
    Send | DraftTree | WriteToken | AddRows | Commit | Provide | RollBack | Stall | Resume | Reconnect | Done
)  # fmt: skip


# --- timing ------------------------------------------------------------------------------------------------


@dataclass
class RoundTimer:
    """When a verdict is overdue: smoothed round time plus four deviations (as TCP does, RFC 6298)."""

    floor: float = 0.25
    ceiling: float = 3.0
    first: float = 2.0  # before anything was measured
    smoothed: float | None = None
    deviation: float = 0.0

    def add(self, seconds: float) -> None:
        if self.smoothed is None:
            self.smoothed, self.deviation = seconds, seconds / 2
            return
        self.deviation += 0.25 * (abs(seconds - self.smoothed) - self.deviation)
        self.smoothed += 0.125 * (seconds - self.smoothed)

    def timeout(self) -> float:
        if self.smoothed is None:
            return self.first
        return min(self.ceiling, max(self.floor, self.smoothed + 4 * self.deviation))


@dataclass(frozen=True)
class Patience:
    """Seconds. open: allowance for a verdict right behind OPEN, when the server may have to prefill the
    whole conversation; connect: how long a new answer waits for a first link; silence: without any message
    for this long, an open link counts as dead; offline: how long a finished unverified answer waits."""

    open: float = 3.0
    connect: float = 1.0
    silence: float = 5.0
    offline: float = 60.0


@dataclass
class _Flight:
    seq: int
    tree: TokenTree
    sent: float
    due: float
    after_open: bool


@dataclass
class SessionStats:
    rounds: int = 0  # tree rounds with a verdict, catch-up rounds not counted
    accepted: int = 0  # draft tokens accepted in these rounds
    nodes: int = 0  # nodes sent in these rounds
    catch_up_rounds: int = 0
    provisional: int = 0  # tokens written alone
    kept: int = 0  # of these, verified later
    rolled_back: int = 0
    stalls: int = 0
    opens: int = 0


@dataclass
class Session:
    """One answer. Feed events by calling the methods; each returns the actions to carry out, in order.

    prompt: token ids of the conversation so far. max_new: committed tokens at most. stream, session_id: as
    on the wire. row_shape: the drafter's. rows_seen: per position of the prompt, 1 if the drafter holds its row.
    """

    prompt: list[int]
    sampling: Sampling
    eos_ids: frozenset[int]
    max_new: int
    max_context: int
    row_shape: RowShape
    session_id: bytes
    stream: int = 0
    rows_seen: bytearray = field(default_factory=bytearray)
    patience: Patience = field(default_factory=Patience)
    timer: RoundTimer = field(default_factory=RoundTimer)

    def __post_init__(self) -> None:
        self.committed = list(self.prompt)
        self.provisional: list[int] = []
        self.stats = SessionStats()
        self.finished: str | None = None
        self.alone = False  # writing without the target
        self.linked = False
        self.ready_tree: TokenTree | None = None
        self.busy = False  # the drafter has a job of ours
        self.version = 0
        self.flight: _Flight | None = None
        self.seq = 0
        self.fresh_open = False  # an OPEN was sent and no VERIFY since
        self.heard = 0.0
        self.retry_at: float | None = None
        self.connect_by: float | None = None
        self.give_up_at: float | None = None
        self.max_nodes = 64
        self.tree_budget = MAX_NODES  # what the verifier asks for now; larger trees it may prune
        self.limit = min(len(self.prompt) + self.max_new, self.max_context)

    # --- events ---

    def start(self, now: float) -> list[Action]:
        """Begin. Drafting starts at once, so that the first tree is ready when the link is."""
        self.heard = now
        if len(self.committed) >= self.limit:
            return self._finish("length")
        if not self.linked:
            self.connect_by = now + self.patience.connect
        return self._work(now)

    def link_up(self, welcome: Welcome, now: float) -> list[Action]:
        """The link is up and the hashes agree: OPEN with everything committed, and go on."""
        self.linked, self.heard = True, now
        self.max_nodes = min(welcome.max_nodes, MAX_NODES)
        self.tree_budget = welcome.tree_budget or MAX_NODES
        self.limit = min(self.limit, welcome.max_context)
        return self._open(now)

    def link_down(self, now: float) -> list[Action]:
        self.linked, self.flight, self.retry_at = False, None, None
        if self.finished or self.connect_by is not None:  # before a first link `connect_by` decides
            return []
        return self._alone(now, now)

    def message(self, message: ServerMessage, now: float) -> list[Action]:
        """A message for this stream arrived."""
        self.heard = now
        if self.finished:
            return []
        match message:
            case Verdict():
                return self._verdict(message, now)
            case Features():
                return self._add_rows(message.start, message.rows)
            case Resync():
                return self._open(now) if self.flight else []
            case Error(code=code, stream=-1) if code == ERR_GOING_AWAY:
                return []  # what is under way is still answered; then the link goes down and comes up elsewhere
            case Error(code=code) if code == ERR_UNKNOWN:
                return self._open(now)
            case Error(code=code) if code == ERR_TOO_LONG:
                return self._finish("length")
            case Error():
                wait = max(0.05, message.retry_after_ms / 1000) if message.code in (ERR_BUSY, ERR_GOING_AWAY) else 1.0
                self.flight, self.retry_at = None, now + wait
                return self._alone(now, now)
            case Opened() | Welcome():
                return []

    def tree_ready(self, tree: TokenTree, version: int, now: float) -> list[Action]:
        """The drafter finished a tree (its answer to DraftTree)."""
        self.busy = False
        if version == self.version:
            self.ready_tree = tree
        return self._work(now)

    def token_written(self, token: int, version: int, now: float) -> list[Action]:
        """The drafter wrote a token (its answer to WriteToken)."""
        self.busy = False
        actions: list[Action] = []
        if version == self.version and self.alone and not self.finished:
            self.provisional.append(token)
            self.version += 1
            self.stats.provisional += 1
            actions.append(Provide(token))
        return actions + self._work(now)

    def tick(self, now: float) -> list[Action]:
        """Time passed; see `wake_at`."""
        if self.finished:
            return []
        if self.connect_by is not None and now >= self.connect_by:
            due, self.connect_by = self.connect_by, None
            return self._alone(due, now)
        if self.give_up_at is not None and now >= self.give_up_at:
            return self._finish("unverified")
        if self.retry_at is not None and now >= self.retry_at:
            self.retry_at = None
            return self._open(now)
        if self.flight and now >= self.flight.due and not self.alone:
            return self._alone(self.flight.due, now)
        if self.flight and now >= self._dead_at(self.flight):
            self.heard = now
            return [Reconnect()]
        return []

    def cancel(self, now: float) -> list[Action]:
        return [] if self.finished else self._finish("cancelled")

    def wake_at(self) -> float | None:
        """When `tick` wants to be called, or None."""
        if self.finished:
            return None
        times = [self.connect_by, self.give_up_at, self.retry_at]
        if self.flight:
            times.append(self._dead_at(self.flight))
            if not self.alone:
                times.append(self.flight.due)
        return min((t for t in times if t is not None), default=None)

    # --- inside ---

    def _dead_at(self, flight: _Flight) -> float:
        """When an open but silent link counts as dead."""
        return max(self.heard, flight.sent) + self.patience.silence

    @property
    def text_ids(self) -> list[int]:
        """What the user sees: the answer's verified and provisional tokens."""
        return self.committed[len(self.prompt) :] + self.provisional

    def _open(self, now: float) -> list[Action]:
        self.flight, self.fresh_open, self.retry_at, self.connect_by = None, True, None, None
        self.stats.opens += 1
        have = self.rows_seen.find(0)
        have = len(self.rows_seen) if have < 0 else have
        have = min(have, len(self.committed) - 1)
        message = Open(self.stream, self.session_id, self.seq, pack_ids(self.committed), have, self.sampling)
        return [Send(message), *self._work(now)]

    def _work(self, now: float) -> list[Action]:
        """Whatever can be done next: send a VERIFY, ask for a tree, or write alone."""
        if self.finished:
            return []
        can_verify = self.linked and self.flight is None and self.retry_at is None
        if can_verify and self.provisional:
            return self._verify(TokenTree.chain(self.provisional[: self.max_nodes]), now) + self._write(now)
        if can_verify and self.ready_tree is not None:
            tree, self.ready_tree = self.ready_tree, None
            # it may have been drafted before the verifier's limits were known
            return self._verify(tree.pruned(self.max_nodes, self._room()), now)
        if self.alone:
            return self._write(now)
        if not self.busy and self.ready_tree is None and self.flight is None:
            self.busy = True
            nodes = min(self.max_nodes, self.tree_budget)
            return [DraftTree(list(self.committed), self.version, nodes, self._room())]
        return []

    def _room(self) -> int:
        """Levels a tree may have; the bonus token takes the last place."""
        return self.limit - len(self.committed) - 1

    def _verify(self, tree: TokenTree, now: float) -> list[Action]:
        self.seq += 1
        after_open, self.fresh_open = self.fresh_open, False
        wait = max(self.timer.timeout(), self.patience.open) if after_open else self.timer.timeout()
        self.flight = _Flight(self.seq, tree, now, now + wait, after_open)
        tokens, parents = pack_tree(tree)
        return [Send(Verify(self.stream, self.seq, len(self.committed), tokens, parents))]

    def _write(self, now: float) -> list[Action]:
        """Ask for one more provisional token, unless the drafter is busy or the answer is full."""
        if self.busy or not self.alone:
            return []
        if self._full():
            self.give_up_at = self.give_up_at or now + self.patience.offline
            return []
        self.busy = True
        return [WriteToken(self.committed + self.provisional, self.version)]

    def _full(self) -> bool:
        """The text, provisional part included, is at its end."""
        ended = bool(self.provisional) and self.provisional[-1] in self.eos_ids
        return ended or len(self.committed) + len(self.provisional) >= self.limit

    def _alone(self, due: float, now: float) -> list[Action]:
        """The target is silent: go on without it."""
        if self.alone:
            return self._work(now)
        self.alone = True
        self.ready_tree = None
        self.version += 1
        self.stats.stalls += 1
        return [Stall(due), *self._work(now)]

    def _verdict(self, verdict: Verdict, now: float) -> list[Action]:
        flight = self.flight
        if flight is None or verdict.seq != flight.seq or verdict.base_len != len(self.committed):
            return []  # of an earlier life of this session
        self.flight = None
        self.tree_budget = verdict.tree_budget or self.tree_budget
        if not flight.after_open:
            self.timer.add(now - flight.sent)
        fresh = [flight.tree.tokens[node] for node in verdict.accepted if node < len(flight.tree)] + [verdict.bonus]
        base = len(self.committed)
        actions = self._add_rows(base - 1, verdict.rows)
        end = next((i + 1 for i, token in enumerate(fresh) if token in self.eos_ids), len(fresh))
        fresh = fresh[: min(end, self.limit - base)]
        if self.provisional:
            self.stats.catch_up_rounds += 1
        else:
            self.stats.rounds += 1
            self.stats.accepted += len(fresh) - 1
            self.stats.nodes += len(flight.tree)
        actions += self._commit(fresh)
        if self.alone:
            self.alone, self.give_up_at = False, None
            actions.append(Resume())
        if self.committed[-1] in self.eos_ids and len(self.committed) > len(self.prompt):
            return actions + self._finish("stop")
        if len(self.committed) >= self.limit or verdict.finish != FINISH_NONE:
            return actions + self._finish("length")
        return actions + self._work(now)

    def _commit(self, fresh: list[int]) -> list[Action]:
        same = 0
        while same < min(len(fresh), len(self.provisional)) and fresh[same] == self.provisional[same]:
            same += 1
        rest = self.provisional[same:]
        actions: list[Action] = []
        if same < len(fresh):  # the target draws otherwise, or says more
            if rest:
                self.stats.rolled_back += len(rest)
                actions.append(RollBack(rest))
            rest = []
        self.provisional = rest
        self.committed += fresh
        self.stats.kept += same
        self.version += 1
        self.ready_tree = None
        return [*actions, Commit(fresh, same)]

    def _add_rows(self, start: int, data: bytes) -> list[Action]:
        """Rows of positions start.. that are new to the drafter."""
        try:
            rows = unpack_rows(data, self.row_shape)
        except ValueError:
            return []  # rows only ever cost speed
        if start + len(rows) > self.max_context:
            return []
        if len(self.rows_seen) < start + len(rows):
            self.rows_seen.extend(bytes(start + len(rows) - len(self.rows_seen)))
        new = [i for i in range(len(rows)) if not self.rows_seen[start + i]]
        if not new:
            return []
        for i in new:
            self.rows_seen[start + i] = 1
        return [AddRows(start + np.array(new), rows[new])]

    def _finish(self, reason: str) -> list[Action]:
        self.finished = reason
        actions: list[Action] = []
        if reason in ("stop", "length") and self.provisional:
            self.stats.rolled_back += len(self.provisional)
            actions.append(RollBack(self.provisional))
            self.provisional = []
        return [*actions, Done(reason)]
