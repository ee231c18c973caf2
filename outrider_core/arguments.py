"""Types of command-line arguments that several commands share, for argparse's `type`."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """Parse a positive whole number."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positive_ints(text: str) -> list[int]:
    """Parse positive whole numbers separated by commas; sorted, without repetitions."""
    return sorted({positive_int(part) for part in text.split(",")})
