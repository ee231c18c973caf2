"""The device's own grammars are compiled in threads that block nothing."""

from __future__ import annotations

import asyncio

import pytest

from edge_runtime.answer.constraints import ConstraintSupport
from outrider_core.protocol.constraint import GRAMMAR_JSON_OBJECT, Constraint
from tests.tiny import EOS, json_tokenizer
from tests.waiting import HANG
from tests.walks import HeldWalks


def test_an_answer_that_is_given_up_ends_the_trial_of_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = HeldWalks(monkeypatch)
    support = ConstraintSupport(json_tokenizer(320).backend_tokenizer, 320, [EOS])

    async def run() -> None:
        making = asyncio.create_task(support.rules(Constraint(1, grammar=GRAMMAR_JSON_OBJECT), 1))
        assert await asyncio.to_thread(walks.begun.wait, HANG)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        walks.go_on.set()

    asyncio.run(run())  # joins the thread
    assert walks.count == 1
