"""Text for training, written by the target's 8-bit copy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.train.answers import AnswerLimits, generate_answers, read_answers
from export.train.exact_decoder import Spans
from export.train.prompts import ChatFormat, Conversation, UserTurn
from export.train.train_options import TrainOptions
from export.train.writer import writing_copy
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.part import POOL_BLOCK
from outrider_core.targets.source import TargetSource
from tests.targets.plain import lowered, plain_decode_8bit
from tests.tiny import tiny_model, tiny_target, tiny_tokenizer

#: several blocks of the pool, so that sequences move
NEW = 150


@pytest.mark.parametrize("slots", [3, *(pytest.param(slots, marks=pytest.mark.slow) for slots in (1, 7))])
def test_answers_are_the_copys_own(slots: int, tmp_path: Path) -> None:
    model = tiny_model("llama", seed=3, hidden=64)
    bundle = lowered(model, tmp_path)
    target = replace(tiny_target(model, (3, *range(20, 24))), tokenizer=tiny_tokenizer())
    chat = ChatFormat(target.tokenizer)
    turns = [UserTurn(" ".join(f"w{4 + (7 * i + j) % 190}" for j in range(1 + 5 * i))) for i in range(7)]
    plans = {i: Conversation((turn,)) for i, turn in enumerate(turns)}
    limits = AnswerLimits(64, NEW, 64 + NEW)
    path = tmp_path / "answers.jsonl"
    generate_answers(target, plans, path, limits=limits, slots=slots, bundle=bundle, on_end=lambda _: None)
    found = {row["index"]: row["ids"][slice(*row["answers"][0])] for row in read_answers(path)}
    ends = set(target.eos_ids)
    assert found == {
        i: plain_decode_8bit(bundle, chat.first(turn), Sampling(), NEW, ends) for i, turn in enumerate(turns)
    }
    assert max(map(len, found.values())) > 2 * POOL_BLOCK


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 700)), max_size=40))
def test_spans_never_overlap_and_stay_near_the_front(moves: list[tuple[int, int]]) -> None:
    spans, held = Spans(6), dict[int, int]()
    for slot, tokens in moves:
        spans.free(slot)
        held.pop(slot, None)
        if tokens:
            spans.take(slot, tokens)
            held[slot] = tokens
        places = sorted((spans.base(slot), spans.room(slot)) for slot in held)
        assert all(spans.room(slot) > tokens for slot, tokens in held.items())
        assert all(base + room <= after for (base, room), (after, _) in pairwise(places))
        assert all(base + room <= 2 * 6 * 12 * POOL_BLOCK for base, room in places)


def test_who_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama", seed=3, hidden=64)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer(model.config.vocab_size).save_pretrained(tmp_path / "model")

    def options(writer: str) -> TrainOptions:
        return TrainOptions(
            tmp_path / "drafter",
            self_prompts=1,
            target=TargetSource.resolve(str(tmp_path / "model")),
            writer=writer,
            device="cpu",
        )

    assert writing_copy(options("torch"), 10_000) is None
    assert writing_copy(options("auto"), 3) is None
    made = writing_copy(options("onnx"), 3)
    assert made and made.folder.is_relative_to(tmp_path / "cache")
    assert writing_copy(options("auto"), 3) == made, "a copy that is there is taken"
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"--writer onnx: .*; use --writer torch"):
        writing_copy(options("onnx"), 3)
    assert writing_copy(options("auto"), 10_000) is None
