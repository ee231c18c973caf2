"""One answer as a pure state machine: events in, actions out. No I/O, no threads, no clock.

`committed` tokens were drawn by the target (or are the prompt); `provisional` tokens behind them were
written by the drafter alone. The text a user sees is committed + provisional.

One rule covers late verdicts, catching up after an outage and the normal round. A verdict commits the
accepted path and the bonus token. If these agree with the provisional tokens, the agreeing part becomes
verified; at the first difference the provisional rest is rolled back (`repair`) or stays as it is (`keep`). While
provisional tokens remain, the next VERIFY is the chain of them instead of a drafted tree.

Times are seconds on any monotonic clock, handed in with each event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from edge_runtime.actions import (
    Action,
    AddRows,
    Adopt,
    Done,
    DraftAhead,
    DraftTree,
    Pause,
    Provide,
    Reconnect,
    Resume,
    RollBack,
    Send,
    Stall,
    WriteToken,
)
from edge_runtime.policy import Mode, Policy
from edge_runtime.timing import Patience, RoundTimer
from edge_runtime.tokens import AnswerTokens, SessionStats
from outrider_core.protocol.rows import RowShape, unpack_rows
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import MAX_NODES, TokenTree
from outrider_core.protocol.wire import (
    ERR_BUSY,
    ERR_GOING_AWAY,
    ERR_TOO_LONG,
    ERR_UNKNOWN,
    FINISH_NONE,
    Cancel,
    Error,
    Features,
    Generate,
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

#: tokens over which the drafter's confidence is averaged
CONFIDENCE_WINDOW = 8


@dataclass
class _Flight:
    """A request whose reply is awaited. tree: None for a GENERATE."""

    seq: int
    tree: TokenTree | None
    sent: float
    due: float
    after_open: bool


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
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        self.stats = SessionStats()
        self.text = AnswerTokens(list(self.prompt), self.stats)
        self.mode = Mode.TREE
        self.finished: str | None = None
        self.alone = False  # the target is silent
        self.paused = ""  # why nothing is written alone
        self.text_over = False  # see `enough`
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
        self.gaps = RoundTimer(self.timer.floor, self.timer.ceiling, self.timer.first)  # between streamed tokens
        self._confidence: deque[float] = deque(maxlen=CONFIDENCE_WINDOW)

    @property
    def committed(self) -> list[int]:
        return self.text.committed

    @property
    def provisional(self) -> list[int]:
        return self.text.provisional

    @property
    def adopted(self) -> list[tuple[int, int]]:
        """Spans of `committed` that the target never saw fit to say itself."""
        return self.text.adopted

    @property
    def text_ids(self) -> list[int]:
        """What the user sees: the answer's verified and provisional tokens."""
        return self.committed[len(self.prompt) :] + self.provisional

    # --- events ---

    def start(self, now: float) -> list[Action]:
        """Begin. Drafting starts at once, so that the first tree is ready when the link is."""
        self.heard = now
        if self._over():
            return self._finish("stop" if self._ended() else "length")
        if self.policy.writer == "device-only":
            return self._alone(now, now)
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

    def token_written(self, token: int, confidence: float, version: int, now: float) -> list[Action]:
        """The drafter wrote a token, to which it gives the probability `confidence` (its answer to WriteToken)."""
        self.busy = False
        actions: list[Action] = []
        if version == self.version and self._may_write() and not self.finished:
            self.text.provide(token)
            self.version += 1
            actions.append(Provide(token))
            actions += self._weigh(confidence)
        return actions + self._work(now)

    def tick(self, now: float) -> list[Action]:
        """Time passed; see `wake_at`."""
        if self.finished:
            return []
        if self.connect_by is not None and now >= self.connect_by:
            due, self.connect_by = self.connect_by, None
            return self._alone(due, now)
        if self.give_up_at is not None and now >= self.give_up_at:
            return self._finish("unreachable" if self.policy.writer == "cloud-only" else "unverified")
        if self.retry_at is not None and now >= self.retry_at:
            self.retry_at = None
            return self._open(now)
        if self.flight and now >= self.flight.due and not self.alone:
            return self._alone(self.flight.due, now)
        if self.flight and now >= self._renew_at(self.flight):
            self.heard = now
            return [Reconnect()]
        return []

    def set_mode(self, mode: Mode, now: float) -> list[Action]:
        """From now on draft trees, or let the target write alone and stream."""
        if mode == self.mode or self.finished:
            return []
        self.mode = mode
        self.version += 1
        self.ready_tree = None
        if self.flight and self.flight.tree is None:  # a GENERATE ends by CANCEL; OPEN says how much of it arrived
            return [Send(Cancel(self.stream)), *self._open(now)]
        return self._work(now)

    def pause(self, now: float) -> list[Action]:
        """Write nothing alone until `proceed`: the battery is low, or the user said so."""
        if self.finished or self.paused == "asked":
            return []
        return [self._pause("asked"), *self._work(now)]

    def proceed(self, now: float) -> list[Action]:
        """Write alone again where the policy lets."""
        if self.finished or not self.paused:
            return []
        self.paused, self.give_up_at = "", None
        self._confidence.clear()
        return self._work(now)

    def cancel(self, now: float) -> list[Action]:
        return [] if self.finished else self._finish("cancelled")

    def stop(self, surplus: int, now: float) -> list[Action]:
        """A stop string ended the text `surplus` committed tokens ago; even if they ended the answer themselves."""
        self.text.withdraw(surplus)
        return self._finish("stop")

    def enough(self) -> None:
        """A stop string came in the provisional text: nothing more is written, unless it is taken back."""
        self.text_over = True

    def wake_at(self) -> float | None:
        """When `tick` wants to be called, or None."""
        if self.finished:
            return None
        times = [self.connect_by, self.give_up_at, self.retry_at]
        if self.flight:
            times.append(self._renew_at(self.flight))
            if not self.alone:
                times.append(self.flight.due)
        return min((t for t in times if t is not None), default=None)

    # --- a record that survives the process ---

    def record(self) -> dict[str, Any]:
        """What `restore` needs, as JSON can carry it."""
        return {
            "version": 1, "prompt": list(self.prompt), "committed": self.committed[len(self.prompt) :],
            "provisional": list(self.provisional), "adopted": [list(span) for span in self.text.adopted],
            "sampling": msgspec.structs.asdict(self.sampling), "max_new": self.max_new, "seq": self.seq,
            "stream": self.stream, "session": self.session_id.hex(),
        }  # fmt: skip

    def restore(self, record: dict[str, Any]) -> None:
        """Take up a recorded answer, before `start`. The session was made with the record's prompt and settings."""
        adopted = [(begin, end) for begin, end in record["adopted"]]
        committed = [*self.prompt, *record["committed"]]
        self.text = AnswerTokens(committed, self.stats, list(record["provisional"]), adopted)
        self.seq = record["seq"]

    # --- inside ---

    def _renew_at(self, flight: _Flight) -> float:
        """When an open but silent link may be dead."""
        return max(self.heard, flight.due) + self.patience.silence

    def _open(self, now: float) -> list[Action]:
        self.flight, self.fresh_open, self.retry_at, self.connect_by = None, True, None, None
        actions = self._adopt() if self.policy.on_return == "keep" else []
        if self._over():
            return actions + self._finish("stop" if self._ended() else "length")
        self.stats.opens += 1
        have = self.rows_seen.find(0)
        have = len(self.rows_seen) if have < 0 else have
        have = min(have, len(self.committed) - 1)
        message = Open(self.stream, self.session_id, self.seq, pack_ids(self.committed), have, self.sampling)
        return [*actions, Send(message), *self._work(now)]

    def _work(self, now: float) -> list[Action]:
        """Whatever can be done next: ask the target, ask for a tree, or write alone."""
        if self.finished:
            return []
        can_ask = self.linked and self.flight is None and self.retry_at is None
        if can_ask and self.provisional:
            return self._verify(TokenTree.chain(self.provisional[: self.max_nodes]), now) + self._write(now)
        if self._writes_first():
            return self._write(now)
        if can_ask and self.mode == "stream":
            return self._generate(now)
        if can_ask and self.ready_tree is not None:
            tree, self.ready_tree = self.ready_tree, None
            # it may have been drafted before the verifier's limits were known
            return self._verify(tree.pruned(self.max_nodes, self._room()), now) + self._ahead()
        if can_ask and self.mode == "tree" and not self.seq:
            return self._verify(TokenTree(), now)  # the first token waits for no tree: the prompt's step draws it
        if self.alone:
            written = self._write(now)
            if written or not can_ask:
                return written
        if not self.busy and self.ready_tree is None and self.flight is None and self.mode == "tree":
            self.busy = True
            nodes = min(self.max_nodes, self.tree_budget)
            return [DraftTree(list(self.committed), self.version, nodes, self._room())]
        return []

    def _writes_first(self) -> bool:
        """The drafter writes without waiting for the target."""
        return self.policy.writer in ("prefer-device", "device-only") and not self.paused

    def _room(self) -> int:
        """Levels a tree may have; the bonus token takes the last place."""
        return self.limit - len(self.committed) - 1

    def _verify(self, tree: TokenTree, now: float) -> list[Action]:
        self._fly(tree, now)
        tokens, parents = pack_tree(tree)
        return [Send(Verify(self.stream, self.seq, len(self.committed), tokens, parents))]

    def _generate(self, now: float) -> list[Action]:
        self._fly(None, now)
        left = self.limit - len(self.committed)
        return [Send(Generate(self.stream, self.seq, len(self.committed), left, True))]

    def _fly(self, tree: TokenTree | None, now: float) -> None:
        self.seq += 1
        self.stats.calls += 1
        after_open, self.fresh_open = self.fresh_open, False
        wait = max(self.timer.timeout(), self.patience.open) if after_open else self.timer.timeout()
        self.flight = _Flight(self.seq, tree, now, now + wait, after_open)

    def _ahead(self) -> list[Action]:
        """The drafter has nothing to do until the verdict."""
        return [] if self.busy else [DraftAhead(self.version)]

    def _may_write(self) -> bool:
        writer = self.policy.writer
        if self.paused or writer == "cloud-only":
            return False
        if writer == "prefer-device" and not self.alone:
            return len(self.provisional) < self.policy.lead
        return self.alone

    def _write(self, now: float) -> list[Action]:
        """Ask for one more provisional token, where one may be written and the answer is not full."""
        can_go_on = self._may_write() and not self._full()
        if self.alone and not can_go_on:
            self.give_up_at = self.give_up_at or now + self.patience.offline
            if self.policy.writer == "device-only" and not self.paused:
                return self._finish("unverified")
        if self.busy or not can_go_on:
            return []
        self.busy = True
        return [WriteToken(self.committed + self.provisional, self.version)]

    def _weigh(self, confidence: float) -> list[Action]:
        """Pause where the drafter has become unsure and the policy says so."""
        self._confidence.append(confidence)
        mean = sum(self._confidence) / len(self._confidence)
        sure = len(self._confidence) < CONFIDENCE_WINDOW or mean >= self.policy.min_confidence
        return [] if sure or self.policy.offline == "continue" else [self._pause("unsure")]

    def _pause(self, reason: str) -> Pause:
        self.paused = reason
        self.stats.pauses += 1
        self.version += 1  # a token under way is not wanted any more
        return Pause(reason)

    def _ended(self) -> bool:
        return self.committed[-1] in self.eos_ids and len(self.committed) > len(self.prompt)

    def _over(self) -> bool:
        return self._ended() or len(self.committed) >= self.limit

    def _full(self) -> bool:
        """The text, provisional part included, is at its end; or the drafter only repeats itself."""
        ended = self.text_over or (bool(self.provisional) and self.provisional[-1] in self.eos_ids)
        return ended or len(self.text) >= self.limit or self.text.looping(len(self.prompt))

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
        self.tree_budget = verdict.tree_budget or self.tree_budget
        nodes = () if flight.tree is None else flight.tree.tokens
        fresh = [nodes[node] for node in verdict.accepted if node < len(nodes)] + [verdict.bonus]
        base = len(self.committed)
        end = next((i + 1 for i, token in enumerate(fresh) if token in self.eos_ids), len(fresh))
        fresh = fresh[: min(end, self.limit - base)]
        self._count(flight, len(fresh), now)
        same = self.text.agreeing(fresh)
        if self.policy.on_return == "keep" and same < min(len(fresh), len(self.provisional)):
            actions = self._add_rows(base - 1, verdict.rows, 1 + same) + self._commit(fresh[:same])
            return actions + self._resume() + self._open(now)
        actions = self._add_rows(base - 1, verdict.rows) + self._commit(fresh) + self._resume()
        if self._ended():
            return actions + self._finish("stop")
        if len(self.committed) >= self.limit or verdict.finish != FINISH_NONE:
            return actions + self._finish("length")
        return actions + self._work(now)

    def _count(self, flight: _Flight, fresh: int, now: float) -> None:
        """Learn from a verdict's time and content. A GENERATE stays under way: its next token is awaited."""
        timer = self.gaps if flight.tree is None and not flight.after_open else self.timer
        if not flight.after_open:
            timer.add(now - flight.sent)
        if flight.tree is None:
            self.stats.streamed += fresh
            self.flight = _Flight(flight.seq, None, now, now + self.gaps.timeout(), False)
            return
        self.flight = None
        if self.provisional:
            self.stats.catch_up_rounds += 1
        else:
            self.stats.rounds += 1
            self.stats.accepted += fresh - 1
            self.stats.nodes += len(flight.tree)

    def _commit(self, fresh: list[int]) -> list[Action]:
        if self.text.agreeing(fresh) < len(fresh):  # the target draws otherwise, or says more
            self.text_over = False
        self.version += 1
        self.ready_tree = None
        return self.text.commit(fresh)

    def _adopt(self) -> list[Action]:
        """Provisional text becomes part of the answer as it is."""
        tokens = self.text.adopt()
        if not tokens:
            return []
        self.version += 1
        return [Adopt(tokens), *self._resume()]

    def _resume(self) -> list[Action]:
        if not self.alone:
            return []
        self.alone, self.give_up_at = False, None
        if self.paused == "unsure":
            self.paused = ""
        self._confidence.clear()
        return [Resume()]

    def _add_rows(self, start: int, data: bytes, most: int | None = None) -> list[Action]:
        """Rows of positions start.. that are new to the drafter; of a verdict's, `most` belong to our text."""
        try:
            rows = unpack_rows(data, self.row_shape)[:most]
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
        if self.flight and self.flight.tree is None and self.linked:
            actions.append(Send(Cancel(self.stream)))  # else it would write on
        if reason in ("stop", "length") and self.provisional:
            actions.append(RollBack(self.text.roll_back()))
        return [*actions, Done(reason)]
