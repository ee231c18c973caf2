"""Types of command-line arguments that several commands share, for argparse's `type`."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """A positive whole number of a command line."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positive_ints(text: str) -> list[int]:
    """Positive whole numbers of a command line, between commas; sorted, each once."""
    return sorted({positive_int(part) for part in text.split(",")})
