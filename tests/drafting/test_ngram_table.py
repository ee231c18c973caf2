"""The table of usual next tokens is read as it was written, and damage is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider_core.drafting.ngrams import NGRAMS_FILE, NgramsError, NgramTable, run_key

KEYS = np.array([3, run_key(0, 3), run_key(7, 3)], np.uint64)
TOKENS, RATES = np.array([5, 6, 40_000], np.uint32), np.array([51, 102, 255], np.uint8)


def test_the_longer_run_counts(tmp_path: Path) -> None:
    written = NgramTable(KEYS, TOKENS, RATES)
    written.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NGRAMS_FILE]
    table = NgramTable.load(tmp_path, 49_152)
    assert table is not None and len(table) == 3
    for each in (written, table):
        assert each.guess(0, 3) == (6, 0.4) and each.guess(7, 3) == (40_000, 1.0)
        assert each.guess(8, 3) == each.guess(-1, 3) == (5, 0.2)
        assert each.guess(3, 4) is None and each.guess(-1, 2**31) is None


def test_damage_is_named(tmp_path: Path) -> None:
    assert NgramTable.load(tmp_path, 100) is None
    good = {"keys": KEYS, "tokens": TOKENS, "rates": RATES}
    for change, words in (
        ({"tokens": TOKENS[:2]}, "not a table"),
        ({"rates": RATES.astype(np.int32)}, "not a table"),
        ({"keys": KEYS[:, None]}, "not a table"),
        ({"keys": KEYS[::-1].copy()}, "not in order"),
        ({"keys": KEYS[[0, 0, 1]]}, "not in order"),
        ({}, "another vocabulary"),  # a token of 40,000
    ):
        save_file({**good, **change}, tmp_path / NGRAMS_FILE)
        with pytest.raises(NgramsError, match=words):
            NgramTable.load(tmp_path, 100)
    whole = (tmp_path / NGRAMS_FILE).read_bytes()
    for content in (b"", b"nonsense", whole[:-5]):
        (tmp_path / NGRAMS_FILE).write_bytes(content)
        with pytest.raises(NgramsError, match="broken"):
            NgramTable.load(tmp_path, 49_152)
    save_file({"keys": KEYS}, tmp_path / NGRAMS_FILE)
    with pytest.raises(NgramsError, match="broken"):
        NgramTable.load(tmp_path, 49_152)
