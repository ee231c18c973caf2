"""Evaluate the outage in the middle of an answer from its events."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_runtime.events import Event, Finished, LinkState, LinkStatus, Provisional, RolledBack, Verified


@dataclass
class Outage:
    """Result of one answer's outage.

    first: seconds from the moment when the target was known to be silent (the deadline of its reply, or the link's end)
    to the first offline token shown. twentieth: from the same moment to the writing of the 20th token of those left
    when the target came back, by any writer; None if there were fewer.

    written: the text left when the target came back, after `before`; own: the target's text there. nats, own_nats: -log
    p per token of each by the target. same: the answer equals plain decoding.
    """

    before: list[int]
    own: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    provisional: int = 0
    understudy: int = 0
    kept: int = 0
    first: float | None = None
    twentieth: float | None = None
    nats: float | None = None
    own_nats: float | None = None
    same: bool = False


class OutageWatch:
    """Receives every event of an answer, and the link's cut and return. plain: the target's own answer."""

    def __init__(self, prompt: list[int], plain: list[int]) -> None:
        self._prompt, self._plain = prompt, plain
        self._shown, self.verified = list[int](), 0
        self._moments = list[float]()  # times of the unverified tokens shown
        self._stalled = False  # and nothing has been written yet
        self._stalls = 0  # with offline text
        self._outage: int | None = None  # the number of the outage among these
        self._first = 0.0
        self._twentieth: float | None = None
        self._found = Outage(list(prompt))
        self.cut = self.back = False

    def see(self, event: Event, now: float) -> None:
        match event:
            case LinkState(state=state):
                self._stalled = state is LinkStatus.ALONE
            case Verified(tokens=tokens, confirmed=confirmed):
                self._remember()
                self._shown[self.verified :] = tokens + self._shown[self.verified + len(tokens) :]
                self.verified += len(tokens)
                del self._moments[:confirmed]
            case Provisional(token=token):
                self._shown.append(token)
                self._moments.append(now)
                if self._stalled:
                    if self.cut and self._outage is None:
                        self._outage, self._first = self._stalls, now
                    self._stalls += 1
                self._stalled = False
            case RolledBack(count=count):
                self._remember()
                del self._shown[len(self._shown) - count :], self._moments[len(self._moments) - count :]

    def _remember(self) -> None:
        """Remember the offline text, which the target may now change."""
        found = self._found
        if not self.back or found.written:
            return
        found.before, found.written = self._prompt + self._shown[: self.verified], self._shown[self.verified :]
        found.own = self._plain[self.verified :][: len(found.written)]
        self._twentieth = self._moments[19] if len(self._moments) > 19 else None

    def end(self, event: Finished) -> Outage:
        """Return the outage, when the answer has ended."""
        found, stats = self._found, event.stats
        found.provisional, found.understudy, found.kept = stats.provisional, stats.understudy, stats.kept
        if self._outage is not None:
            found.first = stats.stall_seconds[self._outage]
            if self._twentieth is not None:
                found.twentieth = self._twentieth - (self._first - found.first)
        found.same = event.token_ids == self._plain
        return found
