"""The options of the device's commands, each declared once: `outrider.cli.arguments` derives flags and help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from edge_runtime.options import AnswerKeywords, RuntimeOptions
from edge_runtime.session.policy import Policy
from outrider.cli.values import at_least, file_to_write, port, seconds
from outrider_core.drafting.engines import RUNTIMES

T = TypeVar("T")


class Flag(NamedTuple):
    """Describes a field's flag. read: argparse's type; with choices or a bool it needs none.

    env: variable that replaces the flag. exclusive: at most one of these flags is given.
    """

    text: str
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    env: str | None = None
    exclusive: bool = False


def _flag(default: T, *flag: Any, **more: Any) -> T:
    made: Any = field(default=default, metadata={"flag": Flag(*flag, **more)})
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Options of every command of the device."""

    bundle: Path | None = _flag(  # noqa: RUF009 - a Path is immutable
        None,
        "bundle folder, as `outrider export bundle` writes it; default: the default model's, made at first use",
        read=Path,
    )
    server: str | None = _flag(
        None,
        "verifier, as host:port, ws://... or wss://...; without it: with --bundle, the device writes every "
        "answer by itself; otherwise the full model runs in this process",
        exclusive=True,
    )
    token: str | None = _flag(
        None,
        "access token for the verifier; the environment variable is safer, as other users of this machine can see "
        "command lines",
        env="OUTRIDER_TOKEN",
    )
    ca_file: Path | None = _flag(  # noqa: RUF009 - a Path is immutable
        None, "PEM file of certificates to trust in addition to the system's", read=Path
    )
    threads: int = _flag(
        0,
        "CPU threads of the drafter, and with --local of the full model too; 0: as many as suit this machine",
        "N",
        at_least(0),
    )


@dataclass(frozen=True, kw_only=True)
class WritingOptions(DeviceOptions):
    """Options that say where the full model is and who writes."""

    local: bool = _flag(
        False,
        "run the full model in this process, without a network; needs outrider[local]; the default without --bundle "
        "and --server",
        exclusive=True,
    )
    model: str | None = _flag(
        None, "with --local: the full model, as alias, Hugging Face id, folder or GGUF file; default: the bundle's"
    )
    drafter: Path | None = _flag(  # noqa: RUF009 - a Path is immutable
        None, "with --local: drafter folder; default: the one that the bundle was made from", read=Path
    )
    dtype: str | None = _flag(
        None,
        "with --local: run the full model in torch, in this number format; default: in 8 bits, without torch",
        choices=("float32", "bfloat16", "float16", "float64"),
    )
    policy: Literal["prefer-cloud", "prefer-device", "cloud-only", "device-only"] = _flag(
        "prefer-cloud",
        "prefer-cloud: the device writes only while the verifier does not answer; prefer-device: it writes at once and "
        "the verifier corrects it; cloud-only: it never writes; device-only: it contacts no verifier",
        choices=("prefer-cloud", "prefer-device", "cloud-only", "device-only"),
    )
    on_return: Literal["repair", "keep"] = _flag(
        "repair",
        "when the link returns: replace offline text that the full model would not have written, or keep it",
        choices=("repair", "keep"),
    )
    offline: Literal["sentence", "continue", "pause"] = _flag(
        "sentence",
        "how far the device writes without a link. sentence: with an understudy (a small complete model in the bundle) "
        "to the end of the answer, otherwise to the end of the sentence; continue: always to the end; pause: until the "
        "model that is writing becomes unsure",
        choices=("sentence", "continue", "pause"),
    )
    understudy: Literal["cold", "warm", "off"] = _flag(
        "cold",
        "when to load the small model that writes offline. cold: when the verifier falls silent; warm: at start, so "
        "that it writes at once, and drafts for the verifier when that is faster; off: never, only the drafter writes",
        choices=("cold", "warm", "off"),
    )

    @property
    def in_process(self) -> bool:
        """Return whether the full model runs in this process: for --local, or if nothing names another place."""
        nothing = self.bundle is None and self.server is None and self.policy != "device-only"
        return self.local or nothing

    def runtime(self, lookup: bool = True) -> RuntimeOptions:
        """Return the options of the runtime."""
        policy = Policy(self.policy, self.on_return, self.offline, understudy=self.understudy)
        return RuntimeOptions(
            policy=policy, threads=self.threads, lookup=lookup, token=self.token, ca_file=self.ca_file
        )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options for sampling and the length of an answer."""

    max_tokens: int = _flag(256, "maximum number of tokens in an answer", "N", at_least(1))
    temperature: float = _flag(0.0, "sampling temperature; 0: always the likeliest token", read=float)
    top_k: int = _flag(0, "keep the likeliest K tokens; 0 keeps every token", read=int)
    top_p: float = _flag(1.0, "keep the likeliest tokens whose probabilities add up to this", read=float)
    min_p: float = _flag(0.0, "drop tokens less likely than this fraction of the likeliest token", read=float)
    seed: int | None = _flag(None, "same seed, same text; default: random", read=int)

    def answer(self, stop: Sequence[str] = ()) -> AnswerKeywords:
        """Return keywords of `EdgeRuntime.generate`."""
        return AnswerKeywords(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=stop,
        )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions, WritingOptions):
    """prompt: the question in one or several parts, of which "-" stands for standard input."""

    stop: tuple[str, ...] = _flag((), "text that ends an answer and is not part of it; repeatable")
    give_up: float | None = _flag(
        None,
        "end an answer after this long without a connection to --server; default: 300",
        "SECONDS",
        seconds,
    )
    json: bool = _flag(False, "print text, token ids and figures as JSON")
    prompt: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions, WritingOptions):
    journal: Path | None = _flag(  # noqa: RUF009 - a Path is immutable
        None, "save the chat in this file and continue it from there, even in mid-answer", "FILE", file_to_write
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(WritingOptions):
    host: str = _flag("127.0.0.1", "address to listen on; beyond loopback it needs --api-key")
    port: int = _flag(8766, "TCP port", read=port)
    api_key: str = _flag("", "bearer token that requests must carry", env="OUTRIDER_API_KEY")
    alias: tuple[str, ...] = _flag(
        (),
        "another name for the model, such as gpt-4o for an app that has that name hard-coded; repeatable",
        "NAME",
    )
    allow_origin: tuple[str, ...] = _flag((), "web page origin that may send requests; repeatable", "URL")
    unverified: Literal["end", "never"] = _flag(
        "end",
        "whether offline text may become content. end: yes, if the answer ends while the verifier is away; never: no. "
        "Before that it is in the reply's field `outrider`",
        choices=("end", "never"),
    )
    no_lookup: bool = _flag(False, "do not draft from repeated text and earlier conversations")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(DeviceOptions):
    engine: str | None = _flag(None, "engine of the drafter; default: whichever is installed", choices=tuple(RUNTIMES))
    json: bool = _flag(False, "print the findings as JSON")
    model: str | None = _flag(
        None,
        "examine only this model, without loading it: alias, folder, GGUF file or Hugging Face id",
        "MODEL",
    )


Options = GenerateOptions | ChatOptions | ServeOptions | DoctorOptions
