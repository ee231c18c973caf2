"""argparse types: parse and check values of flags."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type: whole numbers from `least` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}, not {text!r}")
        return number

    return read


def port(text: str) -> int:
    """Parse a TCP port; 0: any free one."""
    number = at_least(0)(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, at most 65535, not {text!r}")
    return number


def seconds(text: str) -> float:
    """Parse a time above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0, not {text!r}")
    return number


def file_to_write(text: str) -> Path:
    """Parse a file that exists or can be made."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it, or name another file")
    return path
