"""Keep content apart from a chat template: content is text, never one of the template's own tokens.

A template writes turns with the tokenizer's special tokens. If content holds the text of such a token, a mark is
inserted before the template is rendered, which keeps it apart from the tokens that the template writes. Those become
tokens, and marked text is encoded as plain text. Content without such text is encoded as always.

Tokens of the boundary are the special ones, and others that the template itself writes, such as `<tool_response>`. An
assistant's turn may hold the latter: models write them as text (`<think>`), and templates look for them there.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

#: candidates for the mark, of which the text must lack one: for private use, so no template or tokenizer changes them
MARKS = range(0xE000, 0xF900)
#: encloses the temporary names of tokens; not one of MARKS
EDGE = "\ufdd0"
ROLE = re.compile(r"[\w.-]+")

Messages = Sequence[dict[str, Any]]


class ChatBoundary:
    """Encodes conversations of one tokenizer and one chat template.

    encode: token ids of rendered text, by that same tokenizer, with no tokens added around it.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, encode: Callable[[str], list[int]]) -> None:
        self._tokenizer, self._template, self._encode = tokenizer, template, encode
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special and token.content}
        written = {token.content for token in added.values() if token.content and token.content in template}
        self._ids = {token.content: number for number, token in added.items() if token.content in special | written}
        self._added = {token.content: token for token in added.values()}
        normalizer = tokenizer.normalizer
        normalize = normalizer.normalize_str if normalizer is not None else str
        self._everyone, self._assistant = _Tokens(special | written, normalize), _Tokens(special, normalize)

    def encode(self, messages: Messages, render: Callable[[Messages], str]) -> list[int]:
        """Return token ids of a conversation as `render` writes it.

        Raises ValueError on a role that is not a plain name.
        """
        for message in messages:
            role = message.get("role")
            if not isinstance(role, str) or not ROLE.fullmatch(role):
                raise ValueError(f"a role is a plain name such as user or assistant, not {role!r}")
        mark = self._mark(_strings(list(messages)))
        text = render([self._marked(message, mark) for message in messages])
        return self._encode_marked(text, mark) if mark in text else self._encode(text)

    def encode_between(self, before: str, content: str, after: str) -> list[int]:
        """Return token ids of a user's text between two pieces of a rendered template."""
        mark = self._mark([content])
        marked = self._everyone.marked(content, mark)
        text = before + marked + after
        return self._encode_marked(text, mark) if mark in marked else self._encode(text)

    def _marked(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        tokens = self._assistant if message["role"] == "assistant" else self._everyone
        return {key: value if key == "role" else tokens.marked(value, mark) for key, value in message.items()}

    def _mark(self, said: Iterable[str]) -> str:
        used = set(self._template).union(*map(set, said))
        for code in MARKS:
            if chr(code) not in used:
                return chr(code)
        raise ValueError("the conversation uses every character of the private use area; leave some out")

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Encode marked text as plain text; every other occurrence of a token's text becomes the token."""
        plain, names, ids = self._plain
        text = self._everyone.pattern.sub(lambda found: names[found.group()], text).replace(mark, "")
        encoding = plain.encode(text, add_special_tokens=False)
        real: list[int] = []
        for number, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if number in ids:
                real.append(ids[number])
            elif number in self._control or text[begin:end].strip() in self._ids:
                # a vocabulary of whole words may hold it all the same
                real += self._spelled(text[begin:end].strip())
            else:
                real.append(number)
        return real

    def _spelled(self, content: str) -> list[int]:
        """Return token ids of a token's text, character by character."""
        plain, _, _ = self._plain
        ids = [number for character in content for number in plain.encode(character, add_special_tokens=False).ids]
        return [number for number in ids if number not in self._control]

    @cached_property
    def _control(self) -> set[int]:
        """Ids of the boundary's tokens, except the one for unknown text."""
        model = json.loads(self._tokenizer.to_str())["model"]
        unknown = model.get("unk_token")
        if model.get("unk_id") is not None:  # Unigram's name for it
            unknown = model["vocab"][model["unk_id"]][0]
        return {number for content, number in self._ids.items() if content != unknown}

    @cached_property
    def _plain(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """Return a tokenizer with unguessable names of tokens; those names; ids of the names to ids of the tokens."""
        written = json.loads(self._tokenizer.to_str())
        for token in written["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._ids
        plain = Tokenizer.from_str(json.dumps(written))
        plain.no_truncation()
        plain.no_padding()
        plain.encode_special_tokens = True  # encode them as plain text
        secret = secrets.token_hex(16)
        names = {content: f"{EDGE}{secret}.{number}{EDGE}" for content, number in self._ids.items()}
        ids: dict[int, int] = {}
        for content, name in names.items():
            like = self._added[content]
            plain.add_tokens([AddedToken(name, lstrip=like.lstrip, rstrip=like.rstrip, normalized=False)])
            number = plain.token_to_id(name)
            assert number is not None
            ids[number] = self._ids[content]
        return plain, names, ids


def boundary_of(tokenizer: Any) -> ChatBoundary:
    """Return the boundary of a transformers tokenizer and its own chat template, for `render_chat`."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return ChatBoundary(tokenizer.backend_tokenizer, str(tokenizer.chat_template), encode)


def render_chat(tokenizer: Any, messages: Messages) -> str:
    """Render a conversation with a transformers tokenizer's template, up to where the assistant's turn begins."""
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return text


class _Tokens:
    """Texts of tokens, and how to break them, also where a template or the tokenizer changes case or trims.

    normalize: what the tokenizer does to text before it looks for tokens.
    """

    def __init__(self, contents: set[str], normalize: Callable[[str], str]) -> None:
        self.pattern = re.compile(_any_of(contents) if contents else r"(?!)")
        self._normalize = normalize
        self._everywhere = re.compile(f"(?={self.pattern.pattern})", re.IGNORECASE)
        folded = {content.lower() for content in contents}
        self._heads = {content[:length] for content in folded for length in range(1, len(content))}
        self._tails = {content[length:] for content in folded for length in range(1, len(content))}
        self._longest = max(map(len, contents), default=0)

    def marked(self, value: Any, mark: str) -> Any:
        """Return `value`, such as a message's content, with `mark` wherever it could be read as part of a token."""
        if isinstance(value, list | tuple):
            return [self.marked(one, mark) for one in value]
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(one, mark) for key, one in value.items()}
        if not isinstance(value, str):
            return value
        places = self._places(value)
        if not places and self._everywhere.search(self._normalize(value)):
            places = {len(value)}
        if not places:
            return value
        ends = sorted(places)
        return mark.join(value[begin:end] for begin, end in zip([0, *ends], [*ends, len(value)], strict=True))

    def _places(self, value: str) -> set[int]:
        """Return the places where a mark breaks a token in `value`, or one that may begin or end there."""
        places = {found.start() + 1 for found in self._everywhere.finditer(value)}
        for begin, end in {(0, len(value)), (len(value) - len(value.lstrip()), len(value.rstrip()))}:
            most = range(1, min(self._longest, end - begin + 1))
            places.update(end - length + 1 for length in most if value[end - length : end].lower() in self._heads)
            places.update(begin + length - 1 for length in most if value[begin : begin + length].lower() in self._tails)
        return places


def _any_of(words: Iterable[str]) -> str:
    """Return a regular expression for the longest of `words`, in time that does not grow with their number."""
    by_start: dict[str, set[str]] = {}
    for word in words:
        if word:
            by_start.setdefault(word[0], set()).add(word[1:])
    branches = [
        re.escape(start) + (f"(?:{_any_of(rest)}){'?' if '' in rest else ''}" if rest != {""} else "")
        for start, rest in by_start.items()
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _strings(value: Any) -> list[str]:
    """Return every text in `value`."""
    if isinstance(value, str):
        return [value]
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for one in inner for text in _strings(one)]
