"""Trials of schemas that wait for a test."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from outrider_core.chat.grammar import Grammars
from tests.waiting import HANG


class HeldWalks:
    """Walks that try schemas: each waits for `go_on`. count: of those that have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.count = threading.Event(), threading.Event(), 0
        real = Grammars.walk

        def walk(*arguments: Any) -> Any:
            self.count += 1
            self.begun.set()
            assert self.go_on.wait(HANG)
            return real(*arguments)

        monkeypatch.setattr(Grammars, "walk", walk)
