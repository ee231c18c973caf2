"""The options of the device's commands, each declared once: `outrider.cli.arguments` makes flags and help of them."""

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
    """How a field is given. read: argparse's type; with choices or a bool it needs none. env: variable that stands in
    for the flag. exclusive: at most one of these flags is given."""

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
    """What every command of the device needs."""

    bundle: Path | None = _flag(  # noqa: RUF009 - a Path is immutable
        None,
        "folder that export wrote; default: the default model's in the cache, which chat, generate and serve make",
        read=Path,
    )
    server: str | None = _flag(
        None,
        "host:port, ws://... or wss://... of a verifier; without one the full model runs in this process, and with "
        "--bundle the device writes alone",
        exclusive=True,
    )
    token: str | None = _flag(
        None, "for a verifier that asks for one; others on this machine do not see the variable", env="OUTRIDER_TOKEN"
    )
    ca_file: Path | None = _flag(  # noqa: RUF009 - a Path is immutable
        None, "PEM certificates to trust beside the system's", read=Path
    )
    threads: int = _flag(
        0,
        "threads of the drafter's engine, and with --local of the target as well: they take turns; "
        "0 = all cores, for the target all but one (in 8 bits both of two)",
        "N",
        at_least(0),
    )


@dataclass(frozen=True, kw_only=True)
class WritingOptions(DeviceOptions):
    """Where the full model is, and who writes."""

    local: bool = _flag(
        False,
        "run the full model in this process too: no network; needs outrider[local] and takes the model's memory; "
        "default where neither --bundle nor --server is given",
        exclusive=True,
    )
    model: str | None = _flag(
        None, "with --local: alias, Hugging Face id or folder of the target; default: the name in the bundle"
    )
    drafter: Path | None = _flag(  # noqa: RUF009 - a Path is immutable
        None, "with --local: its folder; default: the one under drafters/ with the bundle's hash", read=Path
    )
    dtype: str | None = _flag(
        None,
        "with --local: run the target in torch, in this number format; default: in 8 bits and without torch on a CPU",
        choices=("float32", "bfloat16", "float16", "float64"),
    )
    policy: Literal["prefer-cloud", "prefer-device", "cloud-only", "device-only"] = _flag(
        "prefer-cloud",
        "prefer-cloud: the device writes where the verifier is silent; prefer-device: it writes at once and is "
        "corrected; cloud-only: never; device-only: never contact a verifier",
        choices=("prefer-cloud", "prefer-device", "cloud-only", "device-only"),
    )
    on_return: Literal["repair", "keep"] = _flag(
        "repair",
        "when the link is back: put right what the device wrote alone, or keep it as it is",
        choices=("repair", "keep"),
    )
    offline: Literal["sentence", "continue", "pause"] = _flag(
        "sentence",
        "without a link: let the understudy write to the end, and where there is none the drafter to the end of its "
        "sentence; write to the end; or pause when the writer becomes unsure",
        choices=("sentence", "continue", "pause"),
    )
    understudy: Literal["cold", "warm", "off"] = _flag(
        "cold",
        "the bundle's complete small model: cold: loaded when the verifier falls silent; warm: reads along, so that it "
        "can write at once, and drafts where that is faster; off: the drafter alone writes",
        choices=("cold", "warm", "off"),
    )

    @property
    def in_process(self) -> bool:
        """Return whether the full model runs in this process: for --local, and where nothing says where it is."""
        nothing = self.bundle is None and self.server is None and self.policy != "device-only"
        return self.local or nothing

    def runtime(self, lookup: bool = True) -> RuntimeOptions:
        """The options of the runtime that writes."""
        policy = Policy(self.policy, self.on_return, self.offline, understudy=self.understudy)
        return RuntimeOptions(
            policy=policy, threads=self.threads, lookup=lookup, token=self.token, ca_file=self.ca_file
        )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer is drawn, and how long it may be."""

    max_tokens: int = _flag(256, "verified tokens of an answer, at most", "N", at_least(1))
    temperature: float = _flag(0.0, "0 is greedy", read=float)
    top_k: int = _flag(0, "keep the likeliest K tokens; 0 keeps every token", read=int)
    top_p: float = _flag(1.0, "keep the likeliest tokens up to this probability", read=float)
    min_p: float = _flag(0.0, "drop tokens below this share of the likeliest one's", read=float)
    seed: int | None = _flag(None, "same seed, same text; default: random", read=int)

    def answer(self, stop: Sequence[str] = ()) -> AnswerKeywords:
        """Keywords of `EdgeRuntime.generate`."""
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

    stop: tuple[str, ...] = _flag((), "text that ends an answer and is not part of it; may be given more than once")
    give_up: float | None = _flag(
        None,
        "end an answer where there was no connection to --server for so long; default: 300",
        "SECONDS",
        seconds,
    )
    json: bool = _flag(False, "print text, token ids and figures as JSON")
    prompt: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions, WritingOptions):
    journal: Path | None = _flag(  # noqa: RUF009 - a Path is immutable
        None, "keep the chat there and continue it, even in mid-answer", "FILE", file_to_write
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(WritingOptions):
    host: str = _flag("127.0.0.1", "beyond loopback: with --api-key alone")
    port: int = _flag(8766, "TCP port", read=port)
    api_key: str = _flag("", "Bearer token that requests must carry", env="OUTRIDER_API_KEY")
    alias: tuple[str, ...] = _flag(
        (),
        "further names of the model, such as gpt-4o for an app that has it built in; may be given more than once",
        "NAME",
    )
    allow_origin: tuple[str, ...] = _flag((), "pages that may ask; may be given more than once", "URL")
    unverified: Literal["end", "never"] = _flag(
        "end",
        "text that no verifier has seen: becomes content at the end of an answer that has to end without one, or "
        "never; until then it travels beside the content, in the field `outrider`",
        choices=("end", "never"),
    )
    no_lookup: bool = _flag(False, "draft without looking up this text and earlier conversations")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(DeviceOptions):
    engine: str | None = _flag(None, "default: what is installed", choices=tuple(RUNTIMES))
    json: bool = _flag(False, "print what was found as JSON")
    model: str | None = _flag(
        None,
        "look at a target alone, without loading it: an alias, a folder, a GGUF file or a Hugging Face id",
        "MODEL",
    )


Options = GenerateOptions | ChatOptions | ServeOptions | DoctorOptions
