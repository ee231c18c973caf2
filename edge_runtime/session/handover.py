"""Who writes alone: the drafter at once, the understudy as soon as it has read the text."""

from __future__ import annotations

from enum import StrEnum

from edge_runtime.session.actions import ReadText
from edge_runtime.session.policy import Policy
from edge_runtime.session.states import Writer

#: tokens of new text after which an understudy that is kept warm reads on
WARM_TOKENS = 64
#: tokens that it may still have to read before it writes the first one alone: nobody notices
FEW_TOKENS = 8


class Reading(StrEnum):
    """How far the understudy is."""

    ABSENT = "absent"  #: there is none, or the policy wants none
    IDLE = "idle"  #: it has nothing to do
    UNDER_WAY = "under way"  #: it reads
    DONE = "done"  #: it has read the text, or nearly all of it, and can write
    BROKEN = "broken"  #: it failed, and is not asked again


class Handover:
    """What the understudy was asked to read, and whether it may write.

    text, base: of the last `ReadText`. holds: the drafter waits for it. writer: who wrote the last token alone.
    """

    def __init__(self, present: bool, policy: Policy) -> None:
        self._warm = policy.understudy == "warm"
        self.reading = Reading.IDLE if present and policy.understudy != "off" else Reading.ABSENT
        self.text: list[int] = []
        self.base = 0
        self.holds = False
        self.writer = Writer.DRAFTER

    @property
    def coming(self) -> bool:
        """It will write, but cannot yet."""
        return self.reading in (Reading.IDLE, Reading.UNDER_WAY)

    @property
    def next_writer(self) -> Writer:
        """Who writes the next token alone."""
        return Writer.UNDERSTUDY if self.reading is Reading.DONE else Writer.DRAFTER

    @property
    def drafts(self) -> bool:
        """It has read along, and can draft what the target verifies."""
        return self._warm and self.reading is Reading.DONE

    def read(self, text: list[int], base: int, holds: bool = False) -> ReadText:
        """Ask for `text` to be read, of which the tokens from `base` on are the drafter's own."""
        self.reading, self.text, self.base, self.holds = Reading.UNDER_WAY, text, base, holds
        return ReadText(text, base)

    def read_to_draft(self, committed: list[int]) -> list[int]:
        """The committed text, which it reads as it drafts behind it, so that it need not be asked to."""
        self.text = list(committed)
        return self.text

    def read_along(self, committed: list[int]) -> list[ReadText]:
        """Where it is kept warm, and enough is new in the committed text, ask for that to be read."""
        idle = self.reading in (Reading.IDLE, Reading.DONE)
        if not (self._warm and idle and len(committed) - len(self.text) >= (WARM_TOKENS if self.text else 1)):
            return []
        return [self.read(list(committed), len(committed))]

    def reads(self, action: ReadText, alone: bool) -> bool:
        """Whether `action` is what it is reading, and to a purpose."""
        return self.reading is Reading.UNDER_WAY and self.text is action.prefix and (alone or self._warm)

    def begin(self, text: list[int]) -> None:
        """The first token alone will stand behind `text`; the drafter writes it where too little of that is read."""
        differ = (index for index, (one, other) in enumerate(zip(self.text, text, strict=False)) if one != other)
        read = next(differ, min(len(self.text), len(text)))
        if self.reading is Reading.DONE and len(text) - read > FEW_TOKENS:
            self.gave_up()

    def has_read(self, text: list[int], alone: bool) -> bool:
        """The text is read. Whether that is how `text` begins, and to a purpose, so that it can write now."""
        ready = text[: len(self.text)] == self.text and (alone or self._warm)
        if ready:
            self.reading = Reading.DONE
        else:
            self.gave_up()
        return ready

    def gave_up(self) -> None:
        """Nothing is known to be read."""
        self.reading, self.text = Reading.IDLE, []

    def failed(self) -> None:
        """It will not be asked again."""
        self.reading, self.writer = Reading.BROKEN, Writer.DRAFTER

    def target_is_back(self) -> None:
        """Nobody writes alone any more."""
        self.writer, self.holds = Writer.DRAFTER, False
        if self.reading is Reading.DONE and not self._warm:
            self.reading = Reading.IDLE
