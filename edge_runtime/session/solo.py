"""Writing without the target: whether that may be done, and why not."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from edge_runtime.session.policy import Policy
from edge_runtime.session.states import PauseReason, Writer

#: tokens over which the drafter's confidence is averaged
CONFIDENCE_WINDOW = 8
#: tokens that the drafter writes alone to finish a sentence, at most
SENTENCE_TOKENS = 24


class Solo:
    """What the policy allows to be written without the target. alone: the target is silent.

    obeys: the device's writers can be held to the answer's constraint, if it has one. sentence_ends: tokens that end a
    sentence or a line.
    """

    def __init__(self, policy: Policy, sentence_ends: Container[int] = frozenset()) -> None:
        self._policy, self._sentence_ends = policy, sentence_ends
        self._confidence: deque[float] = deque(maxlen=CONFIDENCE_WINDOW)
        self.alone = False
        self.obeys = True
        self.paused: PauseReason | None = None
        self._drafted = 0  # tokens that the drafter wrote since the target fell silent
        self._ended_sentence = False  # by the last of them
        self._urged = False  # somebody asked to go on

    @property
    def writes_first(self) -> bool:
        """The device writes without waiting for the target."""
        return self._policy.writer in ("prefer-device", "device-only") and not self.mute

    @property
    def mute(self) -> bool:
        """Nothing is written alone, whatever happens to the link."""
        return bool(self.paused) or not self.obeys or self._policy.writer == "cloud-only"

    @property
    def may_be_taken_back(self) -> bool:
        """What is written now may be taken back, as the target may return."""
        return self.alone and self._policy.writer != "device-only"

    def may_write(self, provisional: int) -> bool:
        """Whether another token may follow `provisional` unverified ones."""
        if self.mute:
            return False
        if self._policy.writer == "prefer-device" and not self.alone:
            return provisional < self._policy.lead
        return self.alone

    @property
    def drafter_is_done(self) -> bool:
        """The drafter has written as much alone as anybody wants to read."""
        limited = self._policy.offline == "sentence" and self.may_be_taken_back and not self._urged
        return limited and (self._ended_sentence or self._drafted >= SENTENCE_TOKENS)

    def wrote(self, token: int, confidence: float, writer: Writer) -> None:
        """`writer` wrote `token`, to which it gives the probability `confidence`."""
        self._confidence.append(confidence)
        if self.alone and writer is Writer.DRAFTER:
            self._drafted += 1
            self._ended_sentence = token in self._sentence_ends

    def handed_over(self) -> None:
        """Another writes from here on."""
        self._confidence.clear()

    @property
    def doubts(self) -> bool:
        """The policy wants a pause, as too little probability was given to what was written last."""
        mean = sum(self._confidence) / max(1, len(self._confidence))
        sure = len(self._confidence) < CONFIDENCE_WINDOW or mean >= self._policy.min_confidence
        return not sure and self._policy.offline == "pause"

    def proceed(self) -> None:
        """Somebody asked to go on."""
        self.paused, self._urged = None, True
        self._confidence.clear()

    def target_is_back(self) -> None:
        """The target answers again; a pause that somebody asked for stays."""
        self.alone = False
        if self.paused is not PauseReason.ASKED:
            self.paused = None
        self._drafted, self._ended_sentence, self._urged = 0, False, False
        self._confidence.clear()
