"""Answers in one compact file: what goes in comes out, and damage is named."""

from __future__ import annotations

import json
import lzma
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.train import corpus
from export.train.corpus import CorpusError, pack, unpack
from outrider_core.chat.tokenizer import open_chat_tokenizer
from outrider_core.targets.gguf_tokenizer import write_tokenizer
from outrider_core.targets.source import DEFAULT_TARGET, TargetSource
from outrider_core.targets.weights import GgufWeights

ROOT = Path(__file__).parents[2]
ids = st.lists(st.integers(0, 200_000), max_size=40)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows = []
    for index in draw(st.sets(st.integers(0, 10_000), max_size=6)):
        tokens = draw(ids)
        cuts = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=4)))
        answers = [[begin, end] for begin, end in zip(cuts[::2], cuts[1::2], strict=False)]
        rows.append({"index": index, "ids": tokens, "answers": answers})
    return rows


@given(conversations())
@settings(max_examples=40)
def test_what_goes_in_comes_out(rows: list[dict[str, Any]]) -> None:
    manifest, found = unpack(pack(rows, {"source": "a test"}))
    assert list(found) == sorted(rows, key=lambda row: row["index"])
    assert manifest["source"] == "a test"
    assert manifest["answer_tokens"] == sum(end - begin for row in rows for begin, end in row["answers"])


def test_the_last_of_equal_rows_counts() -> None:
    rows = [{"index": 3, "ids": [1], "answers": []}, {"index": 3, "ids": [1, 2], "answers": [[1, 2]]}]
    assert list(unpack(pack(rows, {}))[1]) == rows[1:]


def test_a_number_without_an_end_is_damage() -> None:
    stored = msgspec.msgpack.decode(lzma.decompress(pack([{"index": 0, "ids": [1], "answers": []}], {})))
    stored["numbers"] = b"\xff" * 4_000_000  # which took minutes
    with pytest.raises(CorpusError, match="damaged"):
        list(unpack(lzma.compress(msgspec.msgpack.encode(stored)))[1])


def test_damage_is_named() -> None:
    good = pack([{"index": 0, "ids": [1, 2, 3], "answers": [[1, 3]]}], {})
    with pytest.raises(CorpusError, match="cut short"):
        unpack(good[:-20])
    with pytest.raises(CorpusError, match="not a corpus"):
        unpack(b"something else")
    stored = msgspec.msgpack.decode(lzma.decompress(good))
    for change, words in (
        ({"format": 2}, "format 2"),
        ({"ids": stored["ids"][:-2]}, "fewer tokens"),
        ({"ids": stored["ids"][:-1]}, "token ids are damaged"),
        ({"numbers": stored["numbers"][:-1]}, "conversations are damaged"),
        ({"numbers": stored["numbers"] + b"\x80"}, "conversations are damaged"),
    ):
        with pytest.raises(CorpusError, match=words):
            list(unpack(lzma.compress(msgspec.msgpack.encode({**stored, **change})))[1])


def test_the_command_packs_and_unpacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"index": i, "ids": list(range(i, i + 5)), "answers": [[2, 5]]} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed, plain = str(tmp_path / "a.corpus"), str(tmp_path / "b.jsonl")
    assert corpus.main(["pack", str(tmp_path / "a.jsonl"), "--output", packed, "--note", "licence=MIT"]) == 0
    assert corpus.main(["unpack", packed, "--output", plain]) == 0
    assert [json.loads(line) for line in Path(plain).read_text().splitlines()] == rows
    capsys.readouterr()
    assert corpus.main(["show", packed]) == 0
    assert json.loads(capsys.readouterr().out)["licence"] == "MIT"
    assert corpus.main(["show", plain]) == 1
    assert "not a corpus" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_of_the_shipped_corpus_encode_as_they_were_written(tmp_path: Path) -> None:
    """But for those that the target itself cut elsewhere, of which no text is lost; see docs/decisions/tokens.md."""
    write_tokenizer(GgufWeights(TargetSource.resolve(DEFAULT_TARGET).path).fields, tmp_path)
    tokenizer = open_chat_tokenizer(tmp_path).tokenizer
    rows = islice(unpack((ROOT / "corpora" / f"{DEFAULT_TARGET}.corpus").read_bytes())[1], 0, None, 40)
    answers = [row["ids"][begin : end - 1] for row in rows for begin, end in row["answers"]]
    texts = [tokenizer.decode(answer, skip_special_tokens=False) for answer in answers]
    again = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
    whole = [place for place, text in enumerate(texts) if "\ufffd" not in text]
    assert len(answers) > 1000 and len(whole) > 0.99 * len(answers)
    assert all(tokenizer.decode(again[place], skip_special_tokens=False) == texts[place] for place in whole)
    assert sum(again[place] == answers[place] for place in whole) > 0.92 * len(answers)
