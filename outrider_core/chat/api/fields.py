"""The fields that all calls share, and how a body is read.

The verifier (`cloud.server.openai`) and the device's own endpoint (`outrider.cli.serve`) both take them. Invalid
values, and unsupported fields that would change the output, are refused by name; ignored fields are named in a header
of the reply.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from outrider_core.chat.api.constraints import ConstraintFault, constraint_of
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.replies import ReplyWriter
from outrider_core.chat.api.spellings import check_supported, ignored_names, take_spellings
from outrider_core.chat.api.tools import ToolUse
from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.sampling import Sampling

MAX_STOPS, MAX_STOP_LENGTH = 4, 1000
#: largest number of choices, and of log probabilities of one token
MAX_CHOICES, MAX_TOP = 8, 20
_SEEDS = 2**63 - 1


class ApiRequest(Protocol):
    """A request in the form that all endpoints share.

    choices: number of answers, written one after another. conversation: messages in the form of chat templates; None:
    use `plain_prompt`, text or token ids. top: number of alternatives with log probabilities for each token; None: no
    log probabilities. ignored: names of fields that the client has sent and that have no effect.
    """

    model: str

    @property
    def ignored(self) -> Sequence[str]: ...
    @property
    def streams(self) -> bool: ...
    @property
    def choices(self) -> int: ...
    @property
    def conversation(self) -> list[dict[str, Any]] | None: ...
    @property
    def plain_prompt(self) -> str | list[int]: ...
    @property
    def tool_use(self) -> ToolUse | None: ...
    @property
    def top(self) -> int | None: ...
    @property
    def stops(self) -> list[str]: ...
    @property
    def length(self) -> int | None: ...

    def sampling(self, choice: int = 0) -> Sampling:
        """Return how to draw a choice."""

    def constraint(self, begin: int, vocab_size: int) -> Constraint | None:
        """Return the constraint of an answer whose first token has index `begin`. Raises ApiError."""

    def writer(self, model: str, fingerprint: str, prompt_tokens: int, prompt_text: Callable[[], str]) -> ReplyWriter:
        """Return the writer of the reply. prompt_text(): the prompt as text."""

    def named(self) -> AbstractContextManager[None]:
        """Rename fields in an ApiError raised inside: from their name in chat completions to that in this request."""


def token_limit(request: ApiRequest, available: int) -> int:
    """Return the most tokens to write if the context has space for `available`."""
    return available if request.length is None else min(request.length, available)


#: -1, as many clients send it, means the same as absent
Tokens = Annotated[int, Meta(ge=-1, lt=2**31)]


class StreamOptions(Struct):
    """include_usage: send token counts in a last chunk."""

    include_usage: bool | None = None


class Fields(Struct, dict=True):
    """The supported fields that chat and text completions share, within OpenAI's bounds. null means absent.

    NAMES: regular expressions of field names in chat completions -> their names here.
    """

    NAMES: ClassVar[Mapping[str, str]] = {}

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**32)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=_SEEDS)] | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None

    def sampling(self, choice: int = 0) -> Sampling:
        """See ApiRequest. OpenAI's defaults: temperature 1 and a random seed; further choices have the next seeds."""
        seed = secrets.randbits(63) if self.seed is None or self.seed == -1 else self.seed + choice
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else max(self.top_p, 1e-9),  # 0 asks for the most likely token
            min_p=self.min_p or 0.0,
            seed=seed & _SEEDS,
        )

    def constraint(self, begin: int, vocab_size: int) -> Constraint | None:
        """See ApiRequest."""
        try:
            return constraint_of(
                begin,
                vocab_size,
                self.response_format,
                self.logit_bias,
                self.frequency_penalty,
                self.presence_penalty,
                self.tool_use.rules if self.tool_use else None,
            )
        except ConstraintFault as fault:
            raise ApiError(400, str(fault), fault.param) from None

    @classmethod
    @contextmanager
    def named(cls) -> Iterator[None]:
        """See ApiRequest."""
        try:
            yield
        except ApiError as error:
            for name, here in cls.NAMES.items():
                error.param = error.param and re.sub(name, here, error.param)
            raise

    @property
    def tool_use(self) -> ToolUse | None:
        """See ApiRequest."""
        return None

    @classmethod
    def formed_as(cls, fields: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with this `response_format`. Raises ApiError if `fields` have one already."""
        return {"response_format": form}

    @property
    def ignored(self) -> Sequence[str]:
        """See ApiRequest."""
        names: tuple[str, ...] = vars(self).get("_ignored", ())
        return names

    @property
    def streams(self) -> bool:
        """See ApiRequest."""
        return bool(self.stream)

    @property
    def choices(self) -> int:
        """See ApiRequest."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """Stop strings; empty ones stop nothing."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def formed(self) -> bool:
        """Return whether an answer that calls nothing is JSON."""
        return bool((self.response_format or {}).get("type", "text") != "text")

    @property
    def must_call(self) -> bool:
        """Return whether an answer is calls alone."""
        return self.tool_use is not None and self.tool_use.rules.required

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the functions' arguments, by name, as they were sent."""
        tools = self.tool_use.prompt if self.tool_use else []
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def length(self) -> int | None:
        """See ApiRequest."""
        limits = (self.max_completion_tokens, self.max_tokens)
        return next((limit for limit in limits if limit is not None and limit > 0), None)

    def check(self) -> None:
        """Raise ApiError if fields contradict each other."""
        if len(self.stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in self.stops):
            text = f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
            raise ApiError(400, text, "stop")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                way = "leave it out, or send -1, for no limit but the context's"
                raise ApiError(400, f"{name} must be above 0; {way}", name)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", "stream_options")


Read = TypeVar("Read", bound=Fields)


def read(body: bytes, kind: type[Read], neutral: Mapping[str, tuple[Any, ...]]) -> Read:
    """Decode a body and run the checks that need no model.

    neutral: unsupported fields -> the values with which they have no effect; null always has none.

    Raises ApiError with status 400.
    """
    try:
        fields = msgspec.json.decode(body)
        if isinstance(fields, dict):
            check_supported(fields, neutral)
            if form := take_spellings(fields):
                fields |= kind.formed_as(fields, form)
        asked = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error), param_of(str(error)), "invalid_value") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    vars(asked)["_ignored"] = ignored_names(fields, kind, neutral)
    asked.check()
    asked.constraint(0, 2**32)  # before anything is tokenised
    return asked


def param_of(message: str) -> str | None:
    """Return the field that a msgspec message names: in "... - at `$.stop[0]`", "... missing required field `x`"."""
    missing = re.search(r"required field `(\w+)`", message)
    path = re.search(r"at `\$\.?([^`]*)`", message)
    names = [found.group(1) for found in (path, missing) if found and found.group(1)]
    return ".".join(names) or None


def check_model(name: str, served: Collection[str]) -> None:
    """Raise ApiError unless `name` is one that is served here."""
    if name not in served:
        raise ApiError(
            404, f"model {name!r} is not served here; use {next(iter(served))!r}", "model", "model_not_found"
        )
