"""Turn tokens into text as they arrive, without half characters, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

#: decoders write this for bytes that are not, or not yet, a character
REPLACEMENT = "\ufffd"
#: a UTF-8 character has at most four bytes, so more tokens than this never wait for one character
CHARACTER_TOKENS = 4
#: the window is cut once more tokens than this end in a possible half character
WINDOW_TOKENS = 64


class Detokeniser:
    """Decodes one answer token by token.

    decode(ids) is the tokenizer's, without special tokens; `skip` are ids without text. Decoding one token alone loses
    bytes and spaces, so a window is decoded: the tokens of the last piece, whose text is known, then those still
    unsent. Every piece extends a prefix of decode(all ids), except if a tokenizer with byte fallback gives invalid
    UTF-8, which it judges by the whole run of bytes.
    """

    def __init__(self, decode: Callable[[list[int]], str], skip: Container[int] = ()) -> None:
        self._decode, self._skip = decode, skip
        self._context: list[int] = []
        self._pending: list[int] = []
        self._sent = 0  # characters of the window's text that were returned

    def fork(self) -> Detokeniser:
        """Return an independent copy of the present state."""
        copy = Detokeniser(self._decode, self._skip)
        copy._context, copy._pending, copy._sent = [*self._context], [*self._pending], self._sent
        return copy

    def push(self, token: int) -> str:
        """Return the text that `token` completes, "" if it ends inside a character."""
        if token in self._skip:
            return ""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        complete = not text.endswith(REPLACEMENT)
        if not complete and len(self._pending) <= CHARACTER_TOKENS:
            return ""
        piece = text[self._sent :] if complete else text[self._sent : -1]
        if complete and piece:
            self._context, self._pending = self._pending, []
            self._sent = len(self._decode(self._context))
        else:
            self._sent += len(piece)
            if len(self._pending) > WINDOW_TOKENS:
                self._cut(text)
        return piece

    def flush(self) -> str:
        """Return the rest at the end of the answer. Bytes that never became a character are dropped."""
        return self._decode(self._context + self._pending).rstrip(REPLACEMENT)[self._sent :]

    def _cut(self, text: str) -> None:
        """Keep the last token alone if a character begins with it, so that the window stays short."""
        last = self._decode(self._pending[-1:])
        if last.endswith(REPLACEMENT) and self._decode(self._context + self._pending[:-1]) + last == text:
            self._context, self._pending = [], self._pending[-1:]
            self._sent = len(last) - 1


class StopStrings:
    """Cuts text at the stop string that is complete first, wherever it is split into pieces."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.hit = False
        self._stops, self._held = stops, ""

    def fork(self) -> StopStrings:
        """Return an independent copy of the present state."""
        copy = StopStrings(self._stops)
        copy.hit, copy._held = self.hit, self._held
        return copy

    def push(self, piece: str) -> str:
        """Return text that can no longer belong to a stop string; "" once one was found."""
        if self.hit:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        sure = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[sure:]
        return text[:sure]

    def flush(self) -> str:
        """Return the text held back, once no more can come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`, less than all of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
