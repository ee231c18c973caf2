"""One answer, one arithmetic: what its verified text was computed in, and who may go on with it."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.session.actions import Action, Pin


@dataclass
class AnswerArithmetic:
    """pinned: what the answer's verified text was computed in; "" where there is none yet, or its verifier did not say.
    offered: what the link's verifier computes in; "" where it does not say."""

    pinned: str = ""
    offered: str = ""

    @property
    def wanted(self) -> list[Action]:
        """What the link is to look for."""
        return [Pin(self.pinned)] if self.pinned else []

    def pin(self) -> list[Action]:
        """The link's verifier has written some of the answer: the rest is to be computed like that."""
        if self.pinned or not self.offered:
            return []
        self.pinned = self.offered
        return self.wanted
