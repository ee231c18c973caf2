"""Measure how often lookup guesses the target's token, by match length, in the text and in earlier ones.

    python -m lab.lookup_rates corpora/smollm2-135m-instruct.corpus

`HIT_RATES` and `EARLIER_RATES` of outrider_core.drafting.lookup come from this, on training answers of the default
target.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.progress import track

from export.train.features import Sequence
from export.train.training_set import read_sequences
from outrider_core.drafting.lookup import EARLIER_RATES, HIT_RATES, Lookup

OWN = {rate: length for length, rate in HIT_RATES.items()}
RUNS = {rate: length for length, rate in EARLIER_RATES.items()}


Rates = list[tuple[int, int, float]]  # (match length, positions, hit rate)


def measure(sequences: Iterable[Sequence]) -> tuple[Rates, Rates]:
    """Return rates of matches in the text itself, and of runs in earlier texts if the text's own guess is less sure.

    The earlier texts are those of the sequences before.
    """
    seen, hits = Counter[int](), Counter[int]()
    seen_earlier, hits_earlier = Counter[int](), Counter[int]()
    earlier = Lookup()
    for sequence in sequences:
        text, lookup = sequence.ids, Lookup()
        for end in [end for begin, after in sequence.answers for end in range(begin, after)]:
            lookup.follow(text[:end])
            guess = lookup.guess([])
            length = 0 if guess is None else OWN[guess.rate]
            seen[length] += 1
            hits[length] += guess is not None and guess.token == text[end]
            remembered = earlier.guess(text[max(0, end - max(EARLIER_RATES)) : end])
            if remembered and (guess is None or remembered.rate > guess.rate):
                run = RUNS[remembered.rate]
                seen_earlier[run] += 1
                hits_earlier[run] += remembered.token == text[end]
        earlier.remember(text)
    rates = [(length, seen[length], hits[length] / max(1, seen[length])) for length in (0, *HIT_RATES)]
    return rates, [(run, seen_earlier[run], hits_earlier[run] / max(1, seen_earlier[run])) for run in EARLIER_RATES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, help="a corpus, or an answers file of `python -m export train`")
    parser.add_argument("--limit", type=int, default=700, help="conversations taken")
    parser.add_argument("--seed", type=int, default=1, help="takes others")
    options = parser.parse_args()
    sequences = read_sequences(options.answers)
    random.Random(options.seed).shuffle(sequences)
    both = measure(track(sequences[: options.limit], "conversations"))
    for where, rates in zip(("in the text", "in earlier ones"), both, strict=True):
        print(f"{where}\nmatch  positions  hit rate")
        for length, positions, rate in rates:
            print(f"{length:5}  {positions:9}  {rate:.3f}")


if __name__ == "__main__":
    main()
