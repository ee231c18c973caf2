"""What the device's commands were asked for, typed. `outrider.cli.arguments` makes these from a command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edge_runtime.session.policy import Policy
from edge_runtime.speed.controller import Mode
from outrider_core.drafting.drafter import TreeShape


@dataclass(frozen=True)
class DeviceOptions:
    """What every command of the device needs. server: an address, or None; token: None where none was given."""

    bundle: Path
    server: str | None
    token: str | None
    ca_file: Path | None
    engine: str | None
    threads: int


@dataclass(frozen=True)
class LocalOptions:
    """What `--local` loads; None: what the bundle names, on the engine that `cloud.engine_choice` chooses."""

    target: str | None
    drafter: Path | None
    dtype: str | None


@dataclass(frozen=True)
class CallOptions:
    """How answers are made. local: None where the target runs elsewhere or nowhere."""

    device: DeviceOptions
    local: LocalOptions | None
    policy: Policy
    shape: TreeShape
    mode: Mode | None
    lookup: bool


@dataclass(frozen=True)
class AnswerOptions:
    """Sampling and length, under the names of `EdgeRuntime.generate`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: list[str]


@dataclass(frozen=True)
class GenerateOptions:
    """prompt: the question, or "-" for standard input. give_up: seconds without a connection that end it, or None."""

    runtime: CallOptions
    answer: AnswerOptions
    prompt: str
    json: bool
    give_up: float | None


@dataclass(frozen=True)
class ChatOptions:
    """journal: file that keeps the chat, or None. give_up: seconds without a connection that end an answer, or None."""

    runtime: CallOptions
    answer: AnswerOptions
    journal: Path | None
    give_up: float | None


@dataclass(frozen=True)
class ServeOptions:
    """key: Bearer token that requests must carry, "" for none."""

    runtime: CallOptions
    host: str
    port: int
    key: str
    origins: list[str]
    unverified: Literal["end", "never"]


@dataclass(frozen=True)
class DoctorOptions:
    device: DeviceOptions
    json: bool


Options = GenerateOptions | ChatOptions | ServeOptions | DoctorOptions
