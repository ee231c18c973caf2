"""Tree or stream: whichever promises more tokens per second."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from edge_runtime.speed.pace import Pace


class Mode(StrEnum):
    """How the device uses the target."""

    TREE = "tree"  #: to verify draft trees
    STREAM = "stream"  #: to write alone


@dataclass
class Controller:
    """Chooses with hysteresis, from the measurements of `pace`. pinned: always this mode.

    While streaming, the device drafts trees for comparison. While drafting trees, it knows a stream's time per token
    only from the verifier's curve, which may be wrong: so if a stream could be faster, it tries one now and then.
    """

    pace: Pace
    pinned: Mode | None = None
    mode: Mode = Mode.TREE
    switches: int = 0
    trials: int = 0
    trial: int = 0  # tokens left of the one under way
    _better: int = 0
    _saved: float = 0.0  # seconds that a trial may cost

    def begin(self, unknown: bool = True) -> Mode:
        """The mode of an answer: trees, unless a stream is faster by the margin in answers of usual length.

        Where a stream's rate differs from answer to answer, one that is nearly as fast will do.

        unknown: nothing tells of this answer yet; otherwise it goes on, on a new link, without hysteresis.
        """
        config = self.pace.config
        if not unknown:
            self._better = config.tokens_to_leave_stream
            return self.choose()
        before = Mode.TREE if self.trial else self.mode
        self.trial = self._better = 0
        self.pace.forget_answer()
        stream = self.pace.stream_rate()
        if self.pinned or stream is None:
            self.mode = before
        else:
            least = config.worth_beginning if self.pace.uneven else config.margin
            self.mode = Mode.STREAM if stream > least * self.pace.usual_draft_rate() else Mode.TREE
            self.switches += self.mode is not before
        return self.pinned or self.mode

    def choose(self) -> Mode:
        """After every verdict."""
        if self.pinned:
            return self.pinned
        config = self.pace.config
        stream, tree = self.pace.stream_rate(), self.pace.draft_rate()
        if stream is None:
            return self.mode
        if self.trial:
            self.trial -= 1
            if not self.trial:
                self._end_trial(stream > config.margin * tree)
            return self.mode
        in_trees = self.mode is Mode.TREE
        now, other = (tree, stream) if in_trees else (stream, self.pace.usual_draft_rate())
        self._better = self._better + 1 if other > config.margin * now else 0
        if self._better >= (config.rounds_to_leave_trees if in_trees else config.tokens_to_leave_stream):
            self.mode = Mode.STREAM if in_trees else Mode.TREE
            self.switches += 1
            self._better = 0
        elif in_trees and stream > config.worth_a_trial * tree:
            self._maybe_try()
        return self.mode

    def _maybe_try(self) -> None:
        """Begin a trial if enough was saved for it."""
        config = self.pace.config
        self._saved += config.trial_share * self.pace.round()
        if self._saved > self.pace.trial_cost() * 2 ** min(self.trials, config.trial_halvings):
            self.mode, self.trial, self._saved = Mode.STREAM, config.trial_tokens, 0.0
            self.trials += 1

    def _end_trial(self, better: bool) -> None:
        self._better = 0
        if better:
            self.switches += 1
        else:
            self.mode = Mode.TREE
