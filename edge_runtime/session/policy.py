"""An app's policy for its answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WhoWrites(StrEnum):
    """The writer of an answer."""

    PREFER_CLOUD = "prefer-cloud"  #: the target's; the device writes while the target is silent
    PREFER_DEVICE = "prefer-device"  #: the device writes at once, at most `lead` tokens ahead; the target corrects it
    CLOUD_ONLY = "cloud-only"  #: the target's alone: the device drafts, but never writes
    DEVICE_ONLY = "device-only"  #: the device's alone: no verifier is contacted


class OnReturn(StrEnum):
    """Treatment of offline text once the target is back."""

    REPAIR = "repair"  #: the target's text replaces what differs from it
    KEEP = "keep"  #: it stays, and the target continues after it; the text is then not the target's own


class Offline(StrEnum):
    """The limit of offline writing."""

    SENTENCE = "sentence"  #: an understudy to the end of the answer; the drafter to the end of its sentence
    CONTINUE = "continue"  #: to the end of the answer, or until it repeats itself
    PAUSE = "pause"  #: until the mean probability of the last tokens falls below `min_confidence`


class UnderstudyUse(StrEnum):
    """Use of the understudy, if the bundle has one."""

    COLD = "cold"  #: it reads the text when the target falls silent, and the drafter writes until it has
    WARM = "warm"  #: it reads along, so that it can write at once, and drafts for the target if that is faster
    OFF = "off"  #: unused: the drafter alone writes


@dataclass(frozen=True)
class Policy:
    """An app's choice who writes, and what happens to offline text. Plain strings such as "device-only" work too.

    Args:
        writer: Whose text an answer is.
        on_return: Treatment of offline text once the target is back.
        offline: How far the device writes offline. "device-only", which waits for no link, continues where "sentence"
            would wait; "pause" is not applied while an understudy is about to write.
        min_confidence: Mean probability of the last tokens written, for "pause".
        lead: Most unverified tokens, for "prefer-device".
        offline_rate: Most tokens per second written offline while the target may come back: no reader is faster, and
            less text is rolled back. A writer that was slow, or whose words replace others, may catch up one second of
            it. It does not limit "device-only".
        understudy: Use of the understudy; "warm" costs computing time while the link is up.

    Raises:
        ValueError: A value is not one of the allowed ones.
    """

    writer: WhoWrites | str = WhoWrites.PREFER_CLOUD
    on_return: OnReturn | str = OnReturn.REPAIR
    offline: Offline | str = Offline.SENTENCE
    min_confidence: float = 0.35
    lead: int = 48
    offline_rate: float = 20.0
    understudy: UnderstudyUse | str = UnderstudyUse.COLD

    def __post_init__(self) -> None:
        for name, kind in (
            ("writer", WhoWrites),
            ("on_return", OnReturn),
            ("offline", Offline),
            ("understudy", UnderstudyUse),
        ):
            object.__setattr__(self, name, kind(getattr(self, name)))
        if not self.offline_rate > 0:
            raise ValueError(f"offline_rate is tokens per second and above 0, not {self.offline_rate}")

    @property
    def target_first(self) -> bool:
        """Return whether the target writes whenever it can, so that trees and streams are alternatives."""
        return self.writer in (WhoWrites.PREFER_CLOUD, WhoWrites.CLOUD_ONLY)
