"""Usual next tokens, counted from a target's answers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloud.loading import load_model
from cloud.settings import Settings
from export.__main__ import main
from export.train.corpus import pack
from export.train.ngrams import LEAST_RATE, LEAST_SEEN, count_ngrams
from outrider_core.drafting.ngrams import NGRAMS_FILE, PARTS, NgramTable
from outrider_core.models.moa_config import DrafterError
from outrider_core.targets.source import TargetSource
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model

Conversation = tuple[list[int], list[tuple[int, int]]]


@st.composite
def conversations(draw: st.DrawFn) -> list[Conversation]:
    texts = []
    for _ in range(draw(st.integers(0, 4))):
        ids = draw(st.lists(st.integers(0, 4), max_size=30))
        cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=4)))
        texts.append((ids, list(zip(cuts[::2], cuts[1::2], strict=False))))
    return texts


@given(conversations())
def test_every_run_of_one_token_and_of_two(texts: list[Conversation]) -> None:
    seen: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for ids, answers in texts:
        for begin, end in answers:
            for at in range(max(1, begin), end):
                seen[-1, ids[at - 1]][ids[at]] += 1
                if at > 1:
                    seen[ids[at - 2], ids[at - 1]][ids[at]] += 1
    table = count_ngrams(texts)
    kept = 0
    for (before, last), following in seen.items():
        most, total = max(following.values()), following.total()
        rate = (most - 0.5) / (total + 1)
        if total < LEAST_SEEN or rate < LEAST_RATE:
            continue
        kept += 1
        found = table.guess(before, last)
        assert found is not None and following[found[0]] == most
        assert found[1] == pytest.approx(rate, abs=0.5 / PARTS + 1e-9)
    assert len(table) == kept


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    model = tiny_model(seed=5, dtype=torch.float32)
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    save_tiny_drafter(drafter, model, save_tiny_target(target, model))
    return target, drafter


ROWS: list[dict[str, Any]] = [
    {"index": i, "ids": [1, 2, 3, 4, 5, 3, 4], "answers": [[2, 7]]} for i in range(4)
] + [{"index": 4, "ids": [9], "answers": []}]  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_the_command_counts_answers_and_corpora(
    tmp_path: Path, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = folders
    settings = Settings(model=str(target), drafter=drafter, dtype="float32", max_model_len=64, kv_tokens=512)
    assert load_model(settings, TargetSource.resolve(settings.model), "torch").ngrams is None
    answers, corpus = tmp_path / "answers.jsonl", tmp_path / "answers.corpus"
    answers.write_text(lines(ROWS) + '{"index": 9, "ids": [1, 2')  # a kill left that
    corpus.write_bytes(pack(ROWS, {}))
    written = []
    for file in (answers, corpus):
        assert main(["ngrams", str(file), "--drafter", str(drafter)]) == 0
        written.append((drafter / NGRAMS_FILE).read_bytes())
        assert "20 answer tokens" in capsys.readouterr().out
    assert written[0] == written[1]
    table = load_model(settings, TargetSource.resolve(settings.model), "torch").ngrams
    assert table is not None and table.guess(1, 2) == (3, pytest.approx(3.5 / 5, abs=0.01))
    assert table.guess(8, 3) == (4, pytest.approx(7.5 / 9, abs=0.01))
    (drafter / NGRAMS_FILE).write_bytes(b"half")
    with pytest.raises(DrafterError, match="count it again"):
        load_model(settings, TargetSource.resolve(settings.model), "torch")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lines([{"index": 0, "ids": [1, 999], "answers": [[1, 2]]}]), "token 999"),
        (lines([{"index": 0, "ids": [1, 2], "answers": []}]), "no answer in"),
        ("", "no answer in"),
        ("hello\n", "line 1"),
        ('{"index": 0}\n', "line 1"),
        ("[1, 2]\n", "line 1"),
        (b"\xfd7zXZ and nothing more", "not a corpus"),
    ],
)
def test_other_files_are_refused_and_the_table_stays(
    content: str | bytes, words: str, tmp_path: Path, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, drafter = folders
    NgramTable.save(count_ngrams([]), drafter)
    before = (drafter / NGRAMS_FILE).read_bytes()
    file = tmp_path / "answers"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["ngrams", str(file), "--drafter", str(drafter)]) == 1
    assert words in capsys.readouterr().err
    assert (drafter / NGRAMS_FILE).read_bytes() == before
    assert main(["ngrams", str(tmp_path / "none"), "--drafter", str(drafter)]) == 1
    assert main(["ngrams", str(file), "--drafter", str(tmp_path)]) == 1
    assert "not a drafter folder" in capsys.readouterr().err
