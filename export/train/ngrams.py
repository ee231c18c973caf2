"""Count the tokens that usually follow one or two tokens in a target's answers: `outrider_core.drafting.ngrams`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.train.corpus import is_corpus, unpack
from outrider_core.drafting.ngrams import PARTS, NgramTable, run_key
from outrider_core.models.drafter_arrays import read_drafter

#: a run that was seen less often is ignored
LEAST_SEEN = 4
#: a guess that is right less often is not worth a row of a step
LEAST_RATE = 0.15

Ints = NDArray[np.int64]


def count_ngrams(conversations: Iterable[tuple[list[int], Iterable[tuple[int, int]]]]) -> NgramTable:
    """Count conversations: token ids, and [begin, end) of each answer.

    The tokens just before an answer count as context.
    """
    runs = [_none()], [_none()]  # (before, last, next), of one token and of two
    for ids, answers in conversations:
        text = np.array([-1, *ids], np.int64)
        for begin, end in answers:
            at = np.arange(max(1, begin), end) + 1
            before = text[at - 2]
            together = np.stack([before, text[at - 1], text[at]], axis=1)
            runs[1].append(together[before >= 0])
            alone = together.copy()
            alone[:, 0] = -1
            runs[0].append(alone)
    found = np.concatenate([_likeliest(np.concatenate(each)) for each in runs])
    keys = np.array([run_key(before, last) for before, last in found[:, :2].tolist()], np.uint64)
    order = np.argsort(keys)
    return NgramTable(keys[order], found[order, 2].astype(np.uint32), found[order, 3].astype(np.uint8))


def _none() -> Ints:
    return np.empty((0, 3), np.int64)


def _likeliest(runs: Ints) -> Ints:
    """Return (before, last, likeliest next, its rate in parts) of each run, from all (before, last, next) seen."""
    each, counts = np.unique(runs, axis=0, return_counts=True)
    order = np.lexsort((-counts, each[:, 1], each[:, 0]))  # a run's likeliest first
    each, counts = each[order], counts[order]
    first = np.ones(len(each), bool)
    first[1:] = (each[1:, :2] != each[:-1, :2]).any(axis=1)
    seen = np.add.reduceat(counts, np.flatnonzero(first)) if len(each) else counts
    rates = (counts[first] - 0.5) / (seen + 1)
    kept = (seen >= LEAST_SEEN) & (rates >= LEAST_RATE)
    return np.concatenate([each[first][kept], np.rint(PARTS * rates[kept, None]).astype(np.int64)], axis=1)


def write_ngrams(files: Iterable[Path], folder: Path) -> tuple[Path, int, int]:
    """Count answers files and corpora, and put the table into a drafter's folder.

    Returns the file, its runs and the answer tokens that were counted. Raises ValueError, DrafterError and OSError with
    one line.
    """
    vocab_size, answered = read_drafter(folder)[0].vocab_size, 0

    def conversations() -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        nonlocal answered
        for row in (row for file in files for row in _rows(file)):
            ids, answers = row["ids"], [(begin, end) for begin, end in row["answers"]]
            if answers and max(ids) >= vocab_size:
                raise ValueError(f"token {max(ids)} in an answer, where the drafter's target has {vocab_size} tokens")
            answered += sum(end - begin for begin, end in answers)
            yield ids, answers

    table = count_ngrams(conversations())
    if not answered:
        raise ValueError("there is no answer in these files")
    return table.save(folder), len(table), answered


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a corpus, or of an answers file; a line of that which a kill cut short does not count."""
    data = file.read_bytes()
    if is_corpus(file):
        yield from unpack(data)[1]
        return
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            yield {"ids": row["ids"], "answers": row["answers"]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file}, line {number}: no answer as `export train` writes them") from None
