"""An answer's tokens as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider_core.protocol.text import Detokeniser, StopStrings


class AnswerText:
    """The answer as text, updated token by token; provisional text is decoded after the verified text."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decoder, self._stops = Detokeniser(decode), StopStrings(stops)
        self._ahead = self._decoder.fork(), self._stops.fork()
        self.verified = self.provisional = ""

    def commit(self, tokens: list[int]) -> int | None:
        """Add verified tokens; return how many there were up to the end of a stop string, if one came."""
        for count, token in enumerate(tokens, 1):
            self.verified += self._stops.push(self._decoder.push(token))
            if self._stops.hit:
                return count
        return None

    def provide(self, token: int) -> bool:
        """Add a provisional token; return False if a stop string ended the text."""
        decoder, stops = self._ahead
        self.provisional += stops.push(decoder.push(token))
        return not stops.hit

    def rebase(self, provisional: list[int]) -> None:
        """Decode the provisional text again, after the verified text as it is now."""
        self._ahead, self.provisional = (self._decoder.fork(), self._stops.fork()), ""
        for token in provisional:
            self.provide(token)

    def end(self) -> None:
        """End the text: show what was held back as a possible beginning of a character or a stop string."""
        decoder, stops = self._ahead
        if self.provisional:
            self.provisional += stops.push(decoder.flush()) + stops.flush()
        else:
            self.verified += self._stops.push(self._decoder.flush()) + self._stops.flush()
