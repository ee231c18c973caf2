"""Requests for chat completions: what they may contain, and what is refused.

The verifier (`cloud.openai`) and the device's own endpoint (`outrider.cli.serve`) both take them. Fields that would
change the output and are not supported are refused by name; other unknown fields are ignored.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from outrider_core.chat_api.constraints import ConstraintFault, constraint_of
from outrider_core.chat_api.errors import ApiError
from outrider_core.protocol.constraint import Constraint
from outrider_core.protocol.sampling import Sampling

MAX_STOPS, MAX_STOP_LENGTH = 4, 1000
ROLES = ("system", "developer", "user", "assistant")
#: unsupported fields that change the output -> the values with which they have no effect; null always has none
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # no tools can be given, so nothing is chosen
    "functions": ([],),
    "function_call": ("none", "auto"),
    "repetition_penalty": (1,),
    "modalities": (["text"],),
    "audio": (),
}


class Part(Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(Struct):
    """One message of the conversation."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Any] | None = None


class StreamOptions(Struct):
    """include_usage: send token counts in a last chunk of their own."""

    include_usage: bool | None = None


#: -1, as many clients send it, is the same as absent
Tokens = Annotated[int, Meta(ge=-1, lt=2**31)]


class ChatRequest(Struct):
    """The supported fields, within OpenAI's bounds. null is the same as absent."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**32)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None

    @property
    def sampling(self) -> Sampling:
        """How to sample. By OpenAI's defaults: temperature 1 and a random seed."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else max(self.top_p, 1e-9),  # 0 asks for the most likely token
            min_p=self.min_p or 0.0,
            seed=secrets.randbits(63) if self.seed is None or self.seed == -1 else self.seed & (2**63 - 1),
        )

    def constraint(self, begin: int, vocab_size: int) -> Constraint | None:
        """What the answer, whose first token has index `begin`, is held to. Raises ApiError."""
        try:
            return constraint_of(
                begin,
                vocab_size,
                self.response_format,
                self.logit_bias,
                self.frequency_penalty,
                self.presence_penalty,
            )
        except ConstraintFault as fault:
            raise ApiError(400, str(fault), fault.param) from None

    @property
    def stops(self) -> list[str]:
        """Stop strings; empty ones stop nothing."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def token_limit(self, available: int) -> int:
        """The most tokens to write where the context has space for `available`."""
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None and limit > 0]
        return min([*limits[:1], available])

    @property
    def conversation(self) -> list[dict[str, str]]:
        """Messages as chat templates take them. Templates know "developer" as "system"."""
        return [
            {"role": "system" if message.role == "developer" else message.role, "content": _content(message)}
            for message in self.messages
        ]


def parse(body: bytes) -> ChatRequest:
    """Decode and check a request body. Raises ApiError with status 400."""
    try:
        fields = msgspec.json.decode(body)
        if isinstance(fields, dict):
            _check_supported(fields)
        asked = msgspec.convert(fields, ChatRequest)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error), _param(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    for index, message in enumerate(asked.messages):
        _check_message(message, f"messages[{index}]")
    if len(asked.stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in asked.stops):
        text = f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
        raise ApiError(400, text, "stop")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(asked, name) == 0:
            raise ApiError(
                400, f"{name} must be above 0; leave it out, or send -1, for no limit but the context's", name
            )
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    return asked


def _check_supported(fields: dict[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            way = " or ".join(["leave it out", *(f"send {msgspec.json.encode(v).decode()}" for v in neutral)])
            raise ApiError(400, f"{name} is not supported: {way}", name, "unsupported_parameter")


def _check_message(message: Message, where: str) -> None:
    if message.role in ("tool", "function") or message.tool_calls:
        text = "tools are not supported: leave out tool calls and their results, or send them as text of other messages"
        field = "role" if message.role in ("tool", "function") else "tool_calls"
        raise ApiError(400, text, f"{where}.{field}", "unsupported_content")
    if message.role not in ROLES:
        raise ApiError(400, f"role must be one of {', '.join(ROLES)}", f"{where}.role")
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"a message of role {message.role} needs content", f"{where}.content")
    for index, part in enumerate(message.content if isinstance(message.content, list) else []):
        if part.type != "text" or part.text is None:
            text = 'content parts must be {"type": "text", "text": ...}; images, audio and files are not supported'
            raise ApiError(400, text, f"{where}.content[{index}]", "unsupported_content")


def _content(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text or "" for part in message.content or ())


def _param(message: str) -> str | None:
    """The field that a msgspec message is about: from "... - at `$.stop[0]`", "... missing required field `x`"."""
    missing = re.search(r"required field `(\w+)`", message)
    path = re.search(r"at `\$\.?([^`]*)`", message)
    names = [found.group(1) for found in (path, missing) if found and found.group(1)]
    return ".".join(names) or None


def check_model(name: str, served: str) -> None:
    """Raise ApiError unless `name` is what is served here."""
    if name != served:
        raise ApiError(404, f"model {name!r} is not served here; use {served!r}", "model", code="model_not_found")
