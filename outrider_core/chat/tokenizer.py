"""A model's tokenizer and chat template, without transformers: conversations to token ids, and back to text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from outrider_core.chat.boundary import ChatBoundary, Messages
from outrider_core.chat.messages import as_templates_take
from outrider_core.chat.tools import (
    RESULT_TAG,
    plain_messages,
    takes_results,
    uses_tools,
    without_results,
    writes_tools,
)

#: tokens that templates know by name
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: characters of byte-level vocabularies -> their bytes
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + index): byte for index, byte in enumerate(_HIDDEN)}


class ChatTokenizer:
    """A tokenizer with its chat template, "" for none. special_tokens: names in templates -> their text.

    It returns the token ids of transformers' `apply_chat_template`, except that content is text: what looks like a
    special token in it is not one (see `ChatBoundary`).
    """

    def __init__(self, tokenizer: Tokenizer, template: str, special_tokens: Mapping[str, str]) -> None:
        self.tokenizer, self.template, self.special_tokens = tokenizer, template, dict(special_tokens)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens without text."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Return token ids of text, with nothing added around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return token ids of text that begins a sequence, with the tokens that the tokenizer adds there."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def encode_chat(self, messages: Messages, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return token ids of a conversation up to where the assistant's next turn begins.

        messages, tools: in OpenAI's form; see `outrider_core.chat.messages`. The template writes calls and tools if it
        does so in the form of `chat.tool_grammar`; otherwise `outrider_core.chat.tools` does. Raises MessageFault on an
        invalid message, jinja2.TemplateError if the template refuses.
        """
        messages = as_templates_take(messages)
        used = uses_tools(messages, tools)
        if used and self._tags_results:
            messages = without_results(messages)
        if used and not self._writes_tools:
            messages, tools = plain_messages(messages, tools, self._takes_results), ()
        if not tools:
            return self._boundary.encode(messages, self._rendered)
        # the functions are passed as the content of a message, so that their text cannot become a turn either
        carried = {"role": "tools", "content": list(tools)}
        return self._boundary.encode([*messages, carried], lambda all_: self._rendered(all_[:-1], all_[-1]["content"]))

    def fault(self) -> str:
        """Return why no conversation can be written; "" if one can."""
        if not self.template:
            return "no chat template"
        try:
            self.encode_chat([{"role": "user", "content": "Hello"}])
        except (jinja2.TemplateError, ValueError, RecursionError) as error:
            return f"its chat template fails: {' '.join(str(error).split())}"
        return ""

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def spelling(self, token: int) -> tuple[str, bytes]:
        """Return a token's own text and UTF-8 bytes: those in the vocabulary if it shows them, else those of the text.

        Bytes that are not a character have a text like `\\xe2`.
        """
        piece = self.tokenizer.id_to_token(token) or ""
        if token in self.special_ids or token in self.tokenizer.get_added_tokens_decoder():
            return piece, piece.encode()
        if self._byte_level and all(character in BYTES for character in piece):
            data = bytes(BYTES[character] for character in piece)
        elif found := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            data = bytes([int(found.group(1), 16)])
        else:
            data = piece.replace("\u2581", " ").encode()
        return data.decode(errors="backslashreplace"), data

    @cached_property
    def _byte_level(self) -> bool:
        """Return whether the vocabulary writes each byte as one character."""
        return '"ByteLevel"' in self.tokenizer.to_str()

    def _rendered(self, messages: Messages, tools: Sequence[dict[str, Any]] = ()) -> str:
        try:
            text: str = self._compiled.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, RecursionError):
            raise
        except Exception as error:  # templates raise any exception
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from None
        return text

    @cached_property
    def _writes_tools(self) -> bool:
        return writes_tools(self._rendered)

    @cached_property
    def _takes_results(self) -> bool:
        return takes_results(self._rendered)

    @cached_property
    def _tags_results(self) -> bool:
        """Return whether the template writes results between tags that are not tokens, which content could hold too."""
        tagged = RESULT_TAG in self.template and self.tokenizer.token_to_id(RESULT_TAG) is None
        return tagged and (self._writes_tools or self._takes_results)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return chat_environment().from_string(self.template)

    @cached_property
    def _boundary(self) -> ChatBoundary:
        return ChatBoundary(self.tokenizer, self.template, self.encode)


def open_chat_tokenizer(folder: Path) -> ChatTokenizer:
    """Open the tokenizer in a model folder. Raises OSError or ValueError if its files do not load."""
    try:
        tokenizer = _parsed((folder / "tokenizer.json").read_bytes())
    except OSError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{folder}/tokenizer.json does not load: {error}") from None
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not load: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a JSON object")
    special = {name: text for name in TOKEN_NAMES if (text := token_text(settings.get(name)))}
    return ChatTokenizer(tokenizer, read_template(folder, settings), special)


@lru_cache(maxsize=1)
def _parsed(content: bytes) -> Tokenizer:
    """Parse a tokenizer, once for both ends of a process that runs device and verifier."""
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def chat_tokenizer_of(tokenizer: Any) -> ChatTokenizer:
    """Return the same for a fast tokenizer of transformers."""
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if name in TOKEN_NAMES}
    return ChatTokenizer(tokenizer.backend_tokenizer, tokenizer.chat_template or "", special)


def token_text(token: Any) -> str:
    """Return a special token of tokenizer_config.json, which is a string or {"content": ...}; "" if there is none."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def read_template(folder: Path, settings: Mapping[str, Any]) -> str:
    """Read chat_template.jinja, or from tokenizer_config.json of an older folder one template or several with names."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise ValueError(f"{path} does not load: {error}") from None
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        named = (each for each in template if isinstance(each, dict) and each.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) else ""


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox where chat templates are compiled, with transformers' names, filters and tags."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment


class _GenerationTag(Extension):  # type: ignore[misc]
    """`{% generation %}` marks what the assistant writes, for training; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Any) -> str:
        text: str = caller()
        return text


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON; jinja2's own filter would escape characters that HTML reserves."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
