"""The tokens of one answer, and how verified and provisional ones become each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from edge_runtime.session.actions import Action, Commit, RollBack
from edge_runtime.session.states import Writer
from edge_runtime.session.stats import SessionStats
from outrider_core.protocol.ending import FinishReason
from outrider_core.protocol.prefix import common_prefix

#: this many tokens in a row that occur in the answer already are a loop
LOOP = 24


@dataclass(frozen=True)
class Span:
    """Tokens `begin` to `end` - 1 of an answer are `writer`'s."""

    begin: int
    end: int
    writer: Writer


@dataclass
class Transcript:
    """`committed`: the prompt and the tokens that the target drew. `provisional`, after them: offline tokens.

    begin: length of the prompt. limit: most tokens, prompt included. enough: a stop string came in the provisional
    text. writers: of each of the answer's tokens, provisional ones included.
    """

    committed: list[int]
    begin: int
    limit: int
    eos_ids: frozenset[int]
    stats: SessionStats
    provisional: list[int] = field(default_factory=list)
    enough: bool = False
    writers: list[Writer] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        return self.committed[self.begin :] + self.provisional

    @property
    def spans(self) -> list[Span]:
        """Return who wrote which part of the answer, in order."""
        return list(_spans(self.writers))

    @property
    def adopted(self) -> list[Span]:
        """Return the parts of the committed answer that the target did not write."""
        return [span for span in _spans(self.writers[: self._committed]) if span.writer is not Writer.TARGET]

    @property
    def _committed(self) -> int:
        """Tokens of the committed answer."""
        return len(self.committed) - self.begin

    @property
    def room(self) -> int:
        """Levels that a tree may have; the bonus token takes the last place."""
        return self.limit - len(self.committed) - 1

    @property
    def ended(self) -> bool:
        """Return whether the target ended the answer."""
        return self.committed[-1] in self.eos_ids and len(self.committed) > self.begin

    @property
    def over(self) -> bool:
        return self.ended or len(self.committed) >= self.limit

    @property
    def full(self) -> bool:
        """Return whether the text, provisional part included, is at its end, or the drafter only repeats itself."""
        return self.end_alone is not None

    @property
    def end_alone(self) -> FinishReason | None:
        """Return how the text has ended, provisional part included; None if more may follow."""
        if self.enough or (self.provisional and self.provisional[-1] in self.eos_ids):
            return FinishReason.STOP
        if len(self.committed) + len(self.provisional) >= self.limit or self._looping():
            return FinishReason.LENGTH
        return None

    def within(self, fresh: list[int]) -> list[int]:
        """Return the part of `fresh`, the target's next tokens, that belongs to the answer."""
        end = next((i + 1 for i, token in enumerate(fresh) if token in self.eos_ids), len(fresh))
        return fresh[: min(end, self.limit - len(self.committed))]

    def provide(self, token: int, writer: Writer) -> None:
        """Add `token`, which `writer` wrote offline."""
        self.provisional.append(token)
        self.writers.append(writer)
        self.stats.provisional += 1
        self.stats.understudy += writer is Writer.UNDERSTUDY

    def _looping(self) -> bool:
        """Return whether the last LOOP tokens were written offline and occur in the answer already."""
        tail = self.provisional[-LOOP:]
        if len(tail) < LOOP:
            return False
        answer = self.answer
        return any(answer[i : i + LOOP] == tail for i in range(len(answer) - LOOP))

    def agreeing(self, fresh: list[int]) -> int:
        """Return how many of `fresh` agree with the provisional text."""
        return common_prefix(fresh, self.provisional)

    def commit(self, fresh: list[int]) -> list[Action]:
        """Add the target's tokens `fresh`: confirm equal provisional ones, and roll the rest back at a difference."""
        same = self.agreeing(fresh)
        actions: list[Action] = self.withdraw_provisional(same) if same < len(fresh) else []
        begin = self._committed
        self.provisional = self.provisional[same:]
        self.committed += fresh
        self.writers[begin : begin + len(fresh)] = [Writer.TARGET] * len(fresh)
        self.stats.kept += same
        return [*actions, Commit(fresh, same)] if fresh else actions

    def adopt(self) -> list[int]:
        """Make provisional text part of the answer as it is. Returns its tokens."""
        tokens, self.provisional = self.provisional, []
        if tokens:
            self.committed += tokens
            self.stats.adopted += len(tokens)
        return tokens

    def withdraw(self, surplus: int) -> None:
        """Take the last `surplus` committed tokens back, adopted ones among them."""
        committed = self._committed
        end = committed - surplus
        withdrawn = sum(writer is not Writer.TARGET for writer in self.writers[end:committed])
        del self.committed[self.begin + end :], self.writers[end:committed]
        self.stats.adopted -= withdrawn
        self.stats.rolled_back += withdrawn

    def withdraw_provisional(self, keep: int = 0) -> list[Action]:
        """Withdraw all provisional tokens but the first `keep`."""
        rest = self.provisional[keep:]
        self.enough = False
        if not rest:
            return []
        del self.provisional[keep:], self.writers[self._committed + keep :]
        self.stats.rolled_back += len(rest)
        return [RollBack(rest)]


def _spans(writers: list[Writer]) -> Iterator[Span]:
    begin = 0
    for writer, tokens in groupby(writers):
        end = begin + len(list(tokens))
        yield Span(begin, end, writer)
        begin = end
