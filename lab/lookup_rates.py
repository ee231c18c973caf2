"""How often prompt lookup guesses the target's token, by length of the longest match.

    python -m lab.lookup_rates build/train/answers-*.jsonl

`outrider_core.drafting.lookup.HIT_RATES` comes from this, on the default target's training answers.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from outrider_core.drafting.lookup import HIT_RATES, LONGEST, Lookup


def measure(path: Path, limit: int) -> list[tuple[int, int, float]]:
    """(match length, positions, hit rate) over the answers of an answers file of `python -m export train`."""
    seen: Counter[int] = Counter()
    hits: Counter[int] = Counter()
    with path.open(encoding="utf-8") as file:
        for _, line in zip(range(limit), file, strict=False):
            row = json.loads(line)
            text, lookup = row["ids"], Lookup()
            for end in [end for begin, after in row["answers"] for end in range(begin, after)]:
                lookup.follow(text[:end])
                guess = lookup.guess([])
                length = 0 if guess is None else HIT_RATES.index(guess[1]) + 1
                seen[length] += 1
                hits[length] += guess is not None and guess[0] == text[end]
    return [(length, seen[length], hits[length] / max(1, seen[length])) for length in range(LONGEST + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, help="answers file of `python -m export train`")
    parser.add_argument("--limit", type=int, default=700, help="answers read")
    options = parser.parse_args()
    print("match  positions  hit rate")
    for length, positions, rate in measure(options.answers, options.limit):
        print(f"{length:5}  {positions:9}  {rate:.3f}")


if __name__ == "__main__":
    main()
