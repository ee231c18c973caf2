"""Decide who writes while the target is silent: the drafter at once, the understudy once it has read the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from enum import StrEnum

from edge_runtime.session.actions import HandOver, ReadText
from edge_runtime.session.policy import Offline, Policy, UnderstudyUse, WhoWrites
from edge_runtime.session.states import PauseReason, Writer
from outrider_core.protocol.prefix import common_prefix

#: tokens over which the writer's confidence is averaged
CONFIDENCE_WINDOW = 8
#: most tokens that the drafter writes offline to finish a sentence
SENTENCE_TOKENS = 24
#: new tokens after which an understudy that is kept warm reads on
WARM_TOKENS = 64
#: unread tokens at which it may write already: too few to notice
FEW_TOKENS = 8
#: seconds that an answer waits at its end for a verifier that accepts it, if the last one did not
REFUSED_SECONDS = 10.0


class Reading(StrEnum):
    """The understudy's progress in reading."""

    ABSENT = "absent"  #: there is none, or the policy excludes it
    IDLE = "idle"  #: it has nothing to do
    UNDER_WAY = "under way"  #: it is reading
    DONE = "done"  #: it has read the text, or nearly all of it, and can write
    BROKEN = "broken"  #: it failed, and is not asked again


class OfflineWriter:
    """Decides who writes one answer while the target is silent.

    drafter: there is one; otherwise only the understudy writes, and it reads along. active: the target is silent.
    supported: the device's writers can obey the answer's constraint, if it has one. paused: why offline writing is
    paused, if it is. sentence_ends: tokens that end a sentence or a line. wait: seconds to wait for the target once
    offline writing has stopped. give_up_at: end of that.
    """

    def __init__(
        self,
        policy: Policy,
        understudy: bool,
        sentence_ends: Container[int],
        supported: bool,
        wait: float,
        drafter: bool = True,
    ) -> None:
        self._policy, self._drafter, self._sentence_ends = policy, drafter, sentence_ends
        self._warm = policy.understudy is UnderstudyUse.WARM or not drafter
        self.active = False
        self.supported = supported
        self.paused: PauseReason | None = None
        self._wait, self._usual_wait = wait, wait
        self.give_up_at: float | None = None
        self._confidence: deque[float] = deque(maxlen=CONFIDENCE_WINDOW)
        self._drafted = 0  # tokens that the drafter wrote since the target fell silent
        self._ended_sentence = False  # with the last of them
        self._urged = False  # `proceed` was called
        reads = understudy and policy.understudy is not UnderstudyUse.OFF
        self.reading = Reading.IDLE if reads else Reading.ABSENT
        self._read: list[int] = []  # the last text that it should read,
        self._base = 0  # ... of which the tokens from here on are the drafter's own
        self.holds = False  # the drafter waits for it
        self.writer = Writer.DRAFTER  # of the last offline token

    # --- whether ---

    @property
    def device_only(self) -> bool:
        """Return whether the target is never asked."""
        return self._policy.writer is WhoWrites.DEVICE_ONLY

    @property
    def silenced(self) -> bool:
        """Return whether the device may write none of this answer."""
        return not self.supported or self._policy.writer is WhoWrites.CLOUD_ONLY

    @property
    def muted(self) -> bool:
        """Return whether offline writing is paused, whatever happens to the link."""
        return self.silenced or bool(self.paused)

    @property
    def writes_first(self) -> bool:
        """Return whether the device writes without waiting for the target."""
        can = self._drafter or self.reading not in (Reading.ABSENT, Reading.BROKEN)
        return can and self._policy.writer in (WhoWrites.PREFER_DEVICE, WhoWrites.DEVICE_ONLY) and not self.muted

    @property
    def may_be_taken_back(self) -> bool:
        """Return whether the target may return and roll back what is written now."""
        return self.active and not self.device_only

    def may_write(self, provisional: int) -> bool:
        """Return whether another token may follow `provisional` unverified ones."""
        if self.muted or self.active:
            return not self.muted
        return self._policy.writer is WhoWrites.PREFER_DEVICE and provisional < self._policy.lead

    @property
    def drafter_is_done(self) -> bool:
        """Return whether the drafter has written as much as is useful, or is missing."""
        if not self._drafter:
            return True
        limited = self._policy.offline is Offline.SENTENCE and self.may_be_taken_back and not self._urged
        return limited and (self._ended_sentence or self._drafted >= SENTENCE_TOKENS)

    # --- the target falls silent, and returns ---

    def start(self) -> None:
        """Begin, as the target is silent."""
        self.active = True

    def stop(self) -> None:
        """End, as the target answers again; a pause by `pause` remains."""
        self.active, self.give_up_at = False, None
        if self.paused is not PauseReason.ASKED:
            self.paused = None
        self._drafted, self._ended_sentence, self._urged = 0, False, False
        self._confidence.clear()
        self.writer, self.holds = Writer.DRAFTER, False
        if self.reading is Reading.DONE and not self._warm:
            self.reading = Reading.IDLE

    def wait(self, now: float) -> bool:
        """Wait a limited time for the target, as nothing more can be written. Returns False if it will not come."""
        wait = self._usual_wait if self.paused is PauseReason.ASKED else self._wait
        self.give_up_at = self.give_up_at or now + wait
        return not self.device_only or (self.muted and self.paused is not PauseReason.LIMIT)

    def expect_return(self, seconds: float, now: float) -> None:
        """From now on wait no longer than `seconds` for the target."""
        self._wait = min(seconds, self._usual_wait)
        if self.give_up_at is not None and self.paused is not PauseReason.ASKED:
            self.give_up_at = min(self.give_up_at, now + self._wait)

    def accepted(self) -> None:
        """Note that a verifier accepts this answer: if it falls silent, wait for it as long as usual."""
        self._wait = self._usual_wait

    def pause(self, reason: PauseReason) -> None:
        """Write nothing more, until the target answers or `proceed` is called."""
        self.paused = reason

    def proceed(self) -> None:
        """Lift a pause."""
        self.paused, self._urged, self.give_up_at = None, True, None
        self._confidence.clear()

    def set_supported(self, supported: bool) -> None:
        """Set whether the device's writers can obey the answer's constraint."""
        self.supported = supported
        if supported and not self.paused:
            self.give_up_at = None

    # --- who ---

    @property
    def coming(self) -> bool:
        """Return whether the understudy will write, but cannot yet."""
        return self.reading in (Reading.IDLE, Reading.UNDER_WAY)

    @property
    def drafts(self) -> bool:
        """Return whether the understudy has read along, and can draft for the target."""
        return self._warm and self.reading is Reading.DONE

    def next_writer(self) -> Writer | PauseReason | None:
        """Return who writes the next token, or why none is written.

        None while the drafter waits for the understudy, which is still reading.
        """
        if self.reading is Reading.DONE:
            return Writer.UNDERSTUDY
        if self.active or not self._drafter:
            enough = self.drafter_is_done or self.device_only or self.holds
            if self.coming and enough:
                return None
            if self.drafter_is_done:
                return PauseReason.LIMIT
        return Writer.DRAFTER

    def hand_over(self, writer: Writer) -> list[HandOver]:
        """Let `writer` write the next token."""
        if writer is self.writer:
            return []
        self.writer = writer
        self._confidence.clear()
        return [HandOver(writer)]

    def wrote(self, token: int, confidence: float, writer: Writer) -> bool:
        """Note that `writer` wrote `token` with probability `confidence`. Returns whether to continue.

        Not if the policy wants a pause, as the last tokens were improbable; an understudy that will soon write may be
        surer.
        """
        self._confidence.append(confidence)
        if self.active and writer is Writer.DRAFTER:
            self._drafted += 1
            self._ended_sentence = token in self._sentence_ends
        mean = sum(self._confidence) / len(self._confidence)
        sure = len(self._confidence) < CONFIDENCE_WINDOW or mean >= self._policy.min_confidence
        return sure or self._policy.offline is not Offline.PAUSE or self.coming

    # --- the understudy reads ---

    def read_to_write(self, committed: list[int], provisional: list[int]) -> list[ReadText]:
        """Return a request to read before the understudy writes. A drafter's first token comes before that work."""
        if not self.active:
            return []
        text = committed + provisional
        if (
            not provisional
            and self.reading is Reading.DONE
            and len(text) - common_prefix(self._read, text) > FEW_TOKENS
        ):
            self._gave_up()  # the drafter writes the first token if too little is read
        begun = bool(provisional) or self.device_only or not self._drafter
        return [self._ask(text, len(committed))] if self.reading is Reading.IDLE and begun else []

    def read_to_draft(self, committed: list[int]) -> list[int]:
        """Return the committed text, which the understudy reads as it drafts, so that it need not be requested."""
        self._read = list(committed)
        return self._read

    def read_along(self, committed: list[int]) -> list[ReadText]:
        """Return a request to read new committed text, if the understudy is kept warm and there is enough."""
        idle = self.reading in (Reading.IDLE, Reading.DONE)
        if not (self._warm and idle and len(committed) - len(self._read) >= (WARM_TOKENS if self._read else 1)):
            return []
        return [self._ask(list(committed), len(committed))]

    def still_reads(self, action: ReadText) -> bool:
        """Return whether the understudy is reading for `action`, and that is still useful."""
        return self.reading is Reading.UNDER_WAY and self._read is action.prefix and (self.active or self._warm)

    def has_read(self, agreed: int | None, committed: list[int], provisional: list[int]) -> ReadText | int | None:
        """Note that the understudy has read the text, or has cancelled that (None); `agreed`: see `ReadText`.

        Returns how many of the provisional tokens to keep, as it would have written them itself; if none of those that
        it read are withdrawn, a request to read what the drafter wrote meanwhile, while that one waits; None if nothing
        follows.
        """
        if agreed is None:
            self._gave_up()
            return None
        text = committed + provisional
        if text[: len(self._read)] != self._read or not (self.active or self._warm):
            self._gave_up()
            return None
        self.reading = Reading.DONE
        judged = max(self._base + agreed, len(committed))
        if not self.active or judged >= len(text):
            return None
        if judged < len(self._read):
            return judged - len(committed)
        return self._ask(text, judged, holds=True)

    def understudy_failed(self) -> None:
        """Stop using the understudy, as it failed."""
        self.reading, self.writer = Reading.BROKEN, Writer.DRAFTER

    def _ask(self, text: list[int], base: int, holds: bool = False) -> ReadText:
        self.reading, self._read, self._base, self.holds = Reading.UNDER_WAY, text, base, holds
        return ReadText(text, base)

    def _gave_up(self) -> None:
        """Forget what the understudy has read."""
        self.reading, self._read = Reading.IDLE, []
