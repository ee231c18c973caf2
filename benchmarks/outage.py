"""What the events of one answer say about the outage in its middle."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_runtime.events import Event, Finished, LinkState, LinkStatus, Provisional, RolledBack, Verified


@dataclass
class Outage:
    """Result of one answer's outage.

    first: seconds from the moment at which the target was known to be silent (the deadline of its reply, or the link's
    end) to the first token shown alone. twentieth: from the same moment to when the 20th token was written of those
    that stood there when the target came back, whoever wrote it; None where fewer did.

    written: what stood there when the target came back, behind `before`; own: what the target says there. nats,
    own_nats: -log p a token of either by the target. same: the answer is plain decoding's.
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
    """Is told every event of an answer, and when the link is cut and back. plain: the target's own answer."""

    def __init__(self, prompt: list[int], plain: list[int]) -> None:
        self._prompt, self._plain = prompt, plain
        self._shown, self.verified = list[int](), 0
        self._moments = list[float]()  # of the unverified tokens shown
        self._stalled = False  # and nothing was written yet
        self._stalls = 0  # in which something was written
        self._outage: int | None = None  # which of these is the outage
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
        """The target is about to change what was written alone."""
        found = self._found
        if not self.back or found.written:
            return
        found.before, found.written = self._prompt + self._shown[: self.verified], self._shown[self.verified :]
        found.own = self._plain[self.verified :][: len(found.written)]
        self._twentieth = self._moments[19] if len(self._moments) > 19 else None

    def end(self, event: Finished) -> Outage:
        """All of it, when the answer has ended."""
        found, stats = self._found, event.stats
        found.provisional, found.understudy, found.kept = stats.provisional, stats.understudy, stats.kept
        if self._outage is not None:
            found.first = stats.stall_seconds[self._outage]
            if self._twentieth is not None:
                found.twentieth = self._twentieth - (self._first - found.first)
        found.same = event.token_ids == self._plain
        return found
