"""An app's settings for its runtime and its answers, and choices that are otherwise measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from edge_runtime.link.authorization import TokenProvider
from edge_runtime.session.policy import Policy
from edge_runtime.session.timeouts import Patience
from edge_runtime.session.tuning import LARGEST
from edge_runtime.speed.arms import Arm
from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.engines import Engine
from outrider_core.drafting.row_cost import USUAL


@dataclass(frozen=True)
class RuntimeOptions:
    """An app's settings for a runtime.

    Attributes:
        policy: Who writes, and what happens to text that was written offline.
        engine: "onnx", "executorch", an engine object, or None for the first that is in the bundle and installed.
        threads: Threads of the drafter's engine and of the understudy's; 0 takes all cores.
        shape: The largest draft trees.
        lookup: Draft tokens that followed the same few tokens earlier in this text, or in an earlier one of this
            runtime.
        patience: Time limits of waiting; None for the defaults, without limits for a verifier in this process.
        token: Bearer token of the verifier, or an async function that returns it and is asked again after HTTP 401.
            Never sent in clear text to another machine.
        ca_file: PEM certificates to trust beside the system's.
        pins: The public keys that the verifier's own certificate may have, as `sha256/` and the base64 of the SHA-256
            of its SubjectPublicKeyInfo; empty: any.
        idle: Seconds without an answer after which the connection is closed. Nothing is sent or dialled until the next
            answer.
    """

    policy: Policy = Policy()  # noqa: RUF009 - frozen
    engine: str | Engine | None = None
    threads: int = 0
    shape: TreeShape = LARGEST
    lookup: bool = True
    patience: Patience | None = None
    token: str | TokenProvider | None = None
    ca_file: str | Path | None = None
    pins: Collection[str] = ()
    idle: float = 60.0


class RuntimeKeywords(TypedDict, total=False):
    """`RuntimeOptions` as keywords."""

    policy: Policy
    engine: str | Engine | None
    threads: int
    shape: TreeShape
    lookup: bool
    patience: Patience | None
    token: str | TokenProvider | None
    ca_file: str | Path | None
    pins: Collection[str]
    idle: float


class AnswerKeywords(TypedDict, total=False):
    """The keywords of `EdgeRuntime.generate`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    response_format: Mapping[str, Any] | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    frequency_penalty: float
    presence_penalty: float
    tools: Sequence[dict[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool


@dataclass(frozen=True)
class Pinned:
    """Choices that a runtime otherwise makes by measurement: for benchmarks and tests.

    Attributes:
        mode: Send trees or let the target stream; an understudy that writes offline obeys it too.
        shaping: Send smaller trees than the largest when they bring more tokens per second.
        ahead: Draft on while a verdict is awaited; None: if that makes rounds shorter.
        row_cost: Row cost of the engine, see the glossary; None: learn it.
    """

    mode: Arm | Literal["tree", "stream"] | None = None
    shaping: bool = True
    ahead: bool | None = None
    row_cost: float | None = None


#: sends trees of one shape, whatever their gain, and never drafts ahead: for measuring acceptance
FIXED_TREES = Pinned(Arm.TREE, shaping=False, ahead=False, row_cost=USUAL)
