"""Actions that a session requests. Pure data: ports in other languages have the same names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.session.states import PauseReason, Writer
from edge_runtime.speed.arms import Arm
from outrider_core.protocol.ending import FinishReason
from outrider_core.protocol.wire import ClientMessage


@dataclass(frozen=True)
class Send:
    """Give `message` to the link."""

    message: ClientMessage


@dataclass(frozen=True)
class Pin:
    """Accept only verifiers with this arithmetic, or with an unknown one, from now on."""

    arithmetic: str


@dataclass(frozen=True)
class DraftTree:
    """Draft a tree of at most `nodes` nodes and `depth` levels below `prefix`; answer with `Session.tree_ready`.

    depth 0: only the bonus token is wanted. gain: see `TreeShape`; None: the runtime's own.
    """

    prefix: list[int]
    version: int
    nodes: int
    depth: int
    gain: float | None = None


@dataclass(frozen=True)
class DraftChain:
    """Let the understudy draft a chain of `tokens` tokens after `prefix`; answer with `Session.tree_ready`.

    Its seconds are those of the draft's steps, without known tokens and without reading the text.
    """

    prefix: list[int]
    version: int
    tokens: int


@dataclass(frozen=True)
class Compare:
    """Draft a tree below `prefix` that is not sent, to compare it with the stream.

    Answer with `Session.tree_compared`. nodes, depth, gain: see DraftTree. arm: CHAIN: instead of a tree, the
    understudy drafts a chain of `nodes` tokens, see DraftChain.
    """

    prefix: list[int]
    nodes: int
    depth: int
    gain: float | None = None
    arm: Arm = Arm.TREE


@dataclass(frozen=True)
class DraftAhead:
    """Grow the tree that was just sent, while `Session.drafts_ahead`, until the session's version changes; after a
    chain, the understudy drafts on.
    """

    version: int


@dataclass(frozen=True)
class WriteToken:
    """Let `writer` write one token after `prefix`; answer with `Session.token_written(token, ...)`."""

    prefix: list[int]
    version: int
    writer: Writer = Writer.DRAFTER


@dataclass(frozen=True)
class ReadText:
    """Let the understudy read `prefix`; answer with `Session.text_read(agreed, ...)`.

    agreed: how many of the tokens from `base` on it would have written itself, up to the first difference. Reading may
    be cancelled once `Session.still_reads` is False; agreed is None then.
    """

    prefix: list[int]
    base: int


@dataclass(frozen=True)
class AddRows:
    """Feature rows [n, 2, heads, head_dim] of tokens at `positions` [n], which the drafter lacks."""

    positions: NDArray[np.int64]
    rows: NDArray[np.float32]


@dataclass(frozen=True)
class Commit:
    """`tokens` are the target's; the first `confirmed` of them were shown as provisional."""

    tokens: list[int]
    confirmed: int


@dataclass(frozen=True)
class Provide:
    """`writer` wrote `token` offline."""

    token: int
    writer: Writer = Writer.DRAFTER


@dataclass(frozen=True)
class HandOver:
    """From here on `writer` writes offline. why: the understudy's failure, in words for people; else ""."""

    writer: Writer
    why: str = ""


@dataclass(frozen=True)
class RollBack:
    """The last `tokens` provisional tokens are rolled back: the target, or the understudy, draws otherwise."""

    tokens: list[int]


@dataclass(frozen=True)
class Adopt:
    """`tokens`, written offline, stay as they are: the answer continues after them (`keep`)."""

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
    """Offline writing stops until the target answers or `proceed` is called."""

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
