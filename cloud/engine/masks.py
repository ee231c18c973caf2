"""Compute the masks of grammars beside the engine's thread, so that a costly mask delays its own answer alone.

Work on a mask begins as soon as its text is known, and continues while the target runs; llguidance does not hold
Python's lock meanwhile. A step waits for missing masks for a bounded time. A later answer leaves the step, and one with
costly masks takes part in a step only when its next mask is ready.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np

from cloud.engine.fair_worker import FairWorker
from cloud.telemetry import log
from outrider_core.protocol.constraint import GRAMMAR_NONE, Adjustment, Rules

#: seconds that one step waits for masks, all of its sessions together, beyond the target's own time
STEP_SECONDS = 0.005
#: masks of an answer that no step waits for, after a costly or late one
UNWAITED = 16
#: seconds after a costly mask of an account in which no step waits for its new answers
REMEMBERED = 60.0
#: processor seconds above which a mask is costly
COSTLY_SECONDS = 0.005
#: threads for masks, and for costly ones, which have lower priority than all others
THREADS, COSTLY_THREADS = 4, 2


class Masks:
    """The threads that compute masks. woken: called, in one of them, when one is ready."""

    def __init__(self) -> None:
        self._usual = FairWorker("masks", THREADS)
        self._costly = FairWorker("costly-masks", COSTLY_THREADS, behind=True)
        self._seen: dict[str, float] = {}  # when an account's last costly mask was made (time.monotonic())
        self.woken: Callable[[], None] = lambda: None

    def costly(self, account: str) -> bool:
        """Return whether the account's masks were costly a short time ago."""
        return time.monotonic() - self._seen.get(account, -math.inf) < REMEMBERED

    def note(self, account: str) -> None:
        """Note a costly mask of the account."""
        now = time.monotonic()
        self._seen = {each: at for each, at in self._seen.items() if now - at < REMEMBERED} | {account: now}

    def submit(self, account: str, costly: bool, call: Callable[[], Adjustment]) -> Future[Adjustment]:
        """Compute `call` in the account's turn."""
        return (self._costly if costly else self._usual).submit(account, call)

    def close(self) -> None:
        """End the threads; no more masks are computed."""
        self._usual.close()
        self._costly.close()


class FollowedRules:
    """The rules of one answer, called by the engine's thread and followed by others. Only that thread may call it.

    rules: must not be used while a mask is being computed.
    """

    def __init__(self, rules: Rules, account: str, masks: Masks) -> None:
        self.rules, self._account, self._masks = rules, account, masks
        self._made: Future[Adjustment] | None = None
        self._asked = (0, 0)
        self._unwaited = UNWAITED if masks.costly(account) else 0  # masks to come that no step waits for
        self._fault = ""

    @property
    def broken(self) -> str:
        """Return why nothing can be drawn any more, "" while something can. No mask may be in progress."""
        return self._fault or self.rules.broken

    @property
    def held(self) -> bool:
        """Return whether the answer must wait for its mask outside of steps."""
        return self._unwaited > 0 and self._made is not None and not self._made.done()

    def begin(self, text: Sequence[int]) -> None:
        """Start computing the adjustment of the draw after `text`, unless it is ready or another is in progress."""
        if self.rules.constraint.grammar == GRAMMAR_NONE:
            return
        asked = len(text), text[-1] if text else 0
        if self._made is not None and (asked == self._asked or not self._made.done()):
            return
        self._asked = asked
        tokens = list(text)
        self._made = self._masks.submit(self._account, self._unwaited > 0, lambda: self._follow(tokens))
        self._made.add_done_callback(lambda _: self._masks.woken())

    def take(self, text: Sequence[int], until: float) -> Adjustment | None:
        """Return the adjustment of the draw after `text`; None if it is not ready by `until` (time.monotonic())."""
        if self.rules.constraint.grammar == GRAMMAR_NONE:  # biases and penalties take no time
            self.rules.follow(text)
            return self.rules.adjustment()
        while True:
            self.begin(text)
            assert self._made is not None
            asked_here = self._asked == (len(text), text[-1] if text else 0)
            try:
                left = None if until == math.inf else 0.0 if self._unwaited else max(0.0, until - time.monotonic())
                made = self._made.result(left)
            except FutureTimeoutError:
                self._unwaited = UNWAITED
                return None
            if asked_here:
                return made

    def _follow(self, tokens: list[int]) -> Adjustment:
        """Runs in a thread for masks."""
        began = time.thread_time()
        try:
            self.rules.follow(tokens)
            made = self.rules.adjustment()
        except BaseException as error:  # a panic in Rust is not an Exception
            log.error("mask failed", error=type(error).__name__)
            self._fault = "the constraint cannot be obeyed: following it failed"
            made = Adjustment(np.empty(0, np.int64), np.empty(0), np.zeros(1, np.uint32))
        self._unwaited = max(0, self._unwaited - 1)
        if time.thread_time() - began > COSTLY_SECONDS:
            self._unwaited = UNWAITED
            self._masks.note(self._account)
        return made
