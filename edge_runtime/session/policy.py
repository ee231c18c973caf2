"""What an app decides about its answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Mode(StrEnum):
    """How the target is asked."""

    TREE = "tree"  #: to verify draft trees
    STREAM = "stream"  #: to write alone


@dataclass(frozen=True)
class Policy:
    """Who writes, and what becomes of text that the drafter wrote alone.

    writer: "prefer-cloud": the target's text; the drafter writes where the target is silent. "prefer-device": the
    drafter writes at once and the target corrects it, at most `lead` tokens behind. "cloud-only": the drafter drafts
    but never writes. "device-only": nobody is asked.
    on_return: "repair": the target's text replaces what differs from it. "keep": what was written stays, and the target
    goes on behind it; the text is then not the target's own.
    offline: "sentence": an understudy writes to the end of the answer; without one the drafter finishes its sentence,
    as more of its own is not worth reading, and the answer waits for the link. "continue": whoever writes goes on to
    the end of the answer, or until it repeats itself. "pause": until the mean probability of the last tokens written
    falls below `min_confidence`, unless an understudy is about to take over. "device-only", which waits for no link,
    goes on where "sentence" would wait.
    understudy: where the bundle carries one. "cold": it reads the text when the target falls silent, and the drafter
    writes until it has. "warm": it reads along, so that it can write at once, and drafts for the target where that is
    faster; that costs computing time while the link is up. "off": the drafter alone writes.
    offline_rate: tokens per second written alone while the target may come back, at most: faster than anybody reads,
    and no more than that would be taken back. A writer that was slow, or whose words replace others, makes up for a
    second of it. Nothing holds "device-only" up.
    """

    writer: Literal["prefer-cloud", "prefer-device", "cloud-only", "device-only"] = "prefer-cloud"
    on_return: Literal["repair", "keep"] = "repair"
    offline: Literal["sentence", "continue", "pause"] = "sentence"
    min_confidence: float = 0.35
    lead: int = 48
    offline_rate: float = 20.0
    understudy: Literal["cold", "warm", "off"] = "cold"

    def __post_init__(self) -> None:
        if not self.offline_rate > 0:
            raise ValueError(f"offline_rate is tokens per second and above 0, not {self.offline_rate}")

    @property
    def target_first(self) -> bool:
        """The target writes wherever it can, so that trees and streams are alternatives."""
        return self.writer in ("prefer-cloud", "cloud-only")
