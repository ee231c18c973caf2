"""An answer's tokens as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider_core.protocol.text import Detokeniser, StopStrings


class AnswerText:
    """The answer as text, kept up token by token; provisional text is decoded behind the verified one."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decoder, self._stops = Detokeniser(decode), StopStrings(stops)
        self._ahead = self._decoder.fork(), self._stops.fork()
        self.verified = self.provisional = ""

    def commit(self, tokens: list[int]) -> int | None:
        """Add verified tokens; returns how many of them there were up to the end of a stop string, if one came."""
        for count, token in enumerate(tokens, 1):
            self.verified += self._stops.push(self._decoder.push(token))
            if self._stops.hit:
                return count
        return None

    def provide(self, token: int) -> bool:
        """Add a provisional token; False where a stop string ended the text."""
        decoder, stops = self._ahead
        self.provisional += stops.push(decoder.push(token))
        return not stops.hit

    def rebase(self, provisional: list[int]) -> None:
        """The provisional text stands behind the verified one as it is now."""
        self._ahead, self.provisional = (self._decoder.fork(), self._stops.fork()), ""
        for token in provisional:
            self.provide(token)

    def end(self) -> None:
        """End the text: show what was held back as the beginning of a character or a stop string."""
        decoder, stops = self._ahead
        if self.provisional:
            self.provisional += stops.push(decoder.flush()) + stops.flush()
        else:
            self.verified += self._stops.push(self._decoder.flush()) + self._stops.flush()
