"""A small table of the tokens that usually follow one or two tokens in a target's own answers.

Used if the text itself predicts nothing, and looked up in microseconds: `python -m export ngrams` counts it, and it is
stored beside the drafter. Like any guess it can only cost speed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from outrider_core import durable

NGRAMS_FILE = "ngrams.safetensors"
#: rates are stored as multiples of 1 / PARTS
PARTS = 255


class NgramsError(ValueError):
    """A file is not such a table. The message is one line."""


def run_key(before: int, last: int) -> int:
    """Return the key of a run of two tokens; before = -1: of `last` alone."""
    return (before + 1) << 32 | last


class NgramTable:
    """The most frequent token after a run of tokens, and its count.

    keys uint64 [n], ascending: of the runs, see `run_key`. tokens uint32 [n]; rates uint8 [n], in parts of `PARTS`.
    """

    def __init__(self, keys: NDArray[np.uint64], tokens: NDArray[np.uint32], rates: NDArray[np.uint8]) -> None:
        # bisection reads single items four times as fast from this array as from numpy's
        self._keys = array("Q", np.ascontiguousarray(keys, "<u8").tobytes())
        self._tokens, self._rates = tokens, rates

    def __len__(self) -> int:
        return len(self._keys)

    def guess(self, before: int, last: int) -> tuple[int, float] | None:
        """Return (token, rate) after two tokens, or after the last alone if the table lacks the two; or None."""
        for key in (run_key(before, last), last):
            at = bisect_left(self._keys, key)
            if at < len(self._keys) and self._keys[at] == key:
                return int(self._tokens[at]), float(self._rates[at]) / PARTS
        return None

    def save(self, folder: Path) -> Path:
        """Write the table beside a drafter. Returns the file."""
        path = folder / NGRAMS_FILE
        part = path.with_name(f".{path.name}.part")
        keys = np.frombuffer(self._keys.tobytes(), np.uint64)
        save_file({"keys": keys, "tokens": self._tokens, "rates": self._rates}, part)
        part.chmod(0o644)  # safetensors leaves it readable to its owner only
        durable.put_in_place(part, path)
        return path

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> NgramTable | None:
        """Load the table of a drafter's folder; None if there is none. Raises NgramsError."""
        path = folder / NGRAMS_FILE
        if not path.is_file():
            return None
        try:
            arrays = load_file(path)
            keys, tokens, rates = (arrays[name] for name in ("keys", "tokens", "rates"))
        except (SafetensorError, KeyError, OSError) as error:
            raise NgramsError(f"{path}: broken, {error}; delete it, or count it again: export ngrams") from None
        whole = (keys.dtype, tokens.dtype, rates.dtype) == (np.uint64, np.uint32, np.uint8)
        if not whole or keys.ndim != 1 or not keys.shape == tokens.shape == rates.shape:
            raise NgramsError(f"{path}: not a table of runs; delete it, or count it again: export ngrams")
        if (keys[1:] <= keys[:-1]).any() or (tokens >= vocab_size).any():
            raise NgramsError(f"{path}: not in order, or of another vocabulary; count it again: export ngrams")
        return cls(keys, tokens, rates)
