"""The drafter on its own: whether it may write, and why not."""

from __future__ import annotations

from collections import deque

from edge_runtime.policy import Policy
from edge_runtime.states import PauseReason

#: tokens over which the drafter's confidence is averaged
CONFIDENCE_WINDOW = 8


class Solo:
    """What the policy allows the drafter to write without the target. alone: the target is silent."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._confidence: deque[float] = deque(maxlen=CONFIDENCE_WINDOW)
        self.alone = False
        self.paused: PauseReason | None = None

    @property
    def writes_first(self) -> bool:
        """The drafter writes without waiting for the target."""
        return self._policy.writer in ("prefer-device", "device-only") and not self.paused

    @property
    def mute(self) -> bool:
        """Nothing is written alone, whatever happens to the link."""
        return bool(self.paused) or self._policy.writer == "cloud-only"

    @property
    def may_be_taken_back(self) -> bool:
        """The drafter writes while the target may come back."""
        return self.alone and self._policy.writer != "device-only"

    def may_write(self, provisional: int) -> bool:
        """Whether another token may follow `provisional` unverified ones."""
        if self.mute:
            return False
        if self._policy.writer == "prefer-device" and not self.alone:
            return provisional < self._policy.lead
        return self.alone

    def doubts(self, confidence: float) -> bool:
        """A token of probability `confidence` was written: whether the policy wants a pause now."""
        self._confidence.append(confidence)
        mean = sum(self._confidence) / len(self._confidence)
        sure = len(self._confidence) < CONFIDENCE_WINDOW or mean >= self._policy.min_confidence
        return not sure and self._policy.offline == "pause"

    def proceed(self) -> None:
        """Somebody asked to go on."""
        self.paused = None
        self._confidence.clear()

    def target_is_back(self) -> None:
        """The target answers again; a pause that somebody asked for stays."""
        self.alone = False
        if self.paused is PauseReason.UNSURE:
            self.paused = None
        self._confidence.clear()
