"""What a session asks its surroundings to do. Pure data: ports in other languages have the same names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.session.states import PauseReason, Writer
from outrider_core.protocol.ending import FinishReason
from outrider_core.protocol.wire import ClientMessage


@dataclass(frozen=True)
class Send:
    """Give `message` to the link."""

    message: ClientMessage


@dataclass(frozen=True)
class Pin:
    """From now on let only verifiers that compute in `arithmetic` answer, or say nothing of how they compute."""

    arithmetic: str


@dataclass(frozen=True)
class DraftTree:
    """Draft a tree of at most `nodes` nodes and `depth` levels below `prefix`; answer with `Session.tree_ready`.

    depth may be 0: only the bonus token is wanted. gain: as of `TreeShape`; None: the runtime's own.
    """

    prefix: list[int]
    version: int
    nodes: int
    depth: int
    gain: float | None = None


@dataclass(frozen=True)
class DraftChain:
    """Let the understudy draft a chain of `tokens` tokens behind `prefix`; answer with `Session.tree_ready`, where the
    seconds are those of the draft's steps: those of what was known, and of reading the text, do not count."""

    prefix: list[int]
    version: int
    tokens: int


@dataclass(frozen=True)
class Compare:
    """Draft a tree below `prefix` that is not sent: what comes of it is seen in the stream. Answer with
    `Session.tree_compared`. nodes, depth, gain: as of DraftTree. chain: in place of a tree, the understudy is to draft
    a chain of so many tokens, as of DraftChain."""

    prefix: list[int]
    nodes: int
    depth: int
    gain: float | None = None
    chain: int | None = None


@dataclass(frozen=True)
class DraftAhead:
    """Grow the tree that was just sent on, where `Session.drafts_ahead`, until the session's version changes; behind a
    chain, the understudy writes on."""

    version: int


@dataclass(frozen=True)
class WriteToken:
    """Let `writer` write one token behind `prefix`; answer with `Session.token_written(token, ...)`."""

    prefix: list[int]
    version: int
    writer: Writer = Writer.DRAFTER


@dataclass(frozen=True)
class ReadText:
    """Let the understudy read `prefix`; answer with `Session.text_read(agreed, ...)`.

    agreed: how many of the tokens from `base` on it would have written itself, up to the first that it would not. The
    reading may be given up once `Session.still_reads` is False; agreed is None then.
    """

    prefix: list[int]
    base: int


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
    """`writer` wrote `token` on its own."""

    token: int
    writer: Writer = Writer.DRAFTER


@dataclass(frozen=True)
class HandOver:
    """From here on `writer` writes alone. why: the understudy failed, in words for people; else ""."""

    writer: Writer
    why: str = ""


@dataclass(frozen=True)
class RollBack:
    """The last `tokens` provisional tokens are withdrawn: the target, or the understudy, draws otherwise."""

    tokens: list[int]


@dataclass(frozen=True)
class Adopt:
    """`tokens`, written by the drafter alone, stay as they are: the answer goes on behind them (`keep`)."""

    tokens: list[int]


@dataclass(frozen=True)
class Stall:
    """The verdict is overdue or the link is down. `deadline`: when it was due."""

    deadline: float


@dataclass(frozen=True)
class Resume:
    """The target answers again."""


@dataclass(frozen=True)
class Pause:
    """Writing alone stops until the target answers or somebody asks to go on."""

    reason: PauseReason


@dataclass(frozen=True)
class Reconnect:
    """The link has been silent for too long: make another connection, unless it speaks first."""


@dataclass(frozen=True)
class Done:
    """The answer has ended."""

    reason: FinishReason


Action = (
    Send
    | Pin
    | DraftTree
    | DraftChain
    | Compare
    | DraftAhead
    | WriteToken
    | ReadText
    | AddRows
    | Commit
    | Provide
    | HandOver
    | RollBack
    | Adopt
    | Stall
    | Resume
    | Pause
    | Reconnect
    | Done
)
