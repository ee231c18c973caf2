"""Check the arguments of `generate` before anything is sent, as the verifier would refuse them every time."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Sequence

from outrider_core.protocol.sampling import Sampling

#: bounds of the wire format (`outrider_core.protocol.sampling.Sampling`)
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**32 - 1
MAX_SEED = 2**63 - 1
#: bits of a random seed
DRAWN_SEED_BITS = 62


def checked_sampling(temperature: float, top_k: int, top_p: float, min_p: float, seed: int | None) -> Sampling:
    """Return the parameters to send; a seed of None or -1 is drawn. Raises ValueError that names the wrong one."""
    return Sampling(
        temperature=_number("temperature", temperature, 0.0, MAX_TEMPERATURE),
        top_k=_whole_number("top_k", top_k, 0, MAX_TOP_K, " (0 keeps every token)"),
        top_p=_number("top_p", top_p, 0.0, 1.0, above=True),
        min_p=_number("min_p", min_p, 0.0, 1.0),
        seed=secrets.randbits(DRAWN_SEED_BITS) if seed in (None, -1) else _whole_number("seed", seed, 0, MAX_SEED),
    )


def checked_length(max_new_tokens: int) -> int:
    """Return the limit. Raises ValueError unless `max_new_tokens` is a whole number of at least 1."""
    return _whole_number("max_new_tokens", max_new_tokens, 1)


def checked_stops(stop: str | Sequence[str]) -> list[str]:
    """Return the non-empty stop strings; a single string is allowed. Raises ValueError on anything but text."""
    stops = [stop] if isinstance(stop, str) else list(stop)
    for text in stops:
        if not isinstance(text, str):
            raise ValueError(f"stop is a string or a list of strings; {text!r} is neither")
    return [text for text in stops if text]


def _number(name: str, value: float, least: float, most: float, *, above: bool = False) -> float:
    """Check a number. above: `least` itself is too small."""
    wanted = f"{name} must be {'above' if above else 'at least'} {least:g} and at most {most:g}"
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{wanted}, not {value!r}") from None
    if math.isnan(number) or not least <= number <= most or (above and number == least):
        raise ValueError(f"{wanted}, not {value!r}")
    return number


def _whole_number(name: str, value: int, least: int, most: int | None = None, hint: str = "") -> int:
    wanted = f"{name} must be a whole number, at least {least}{hint}" + (f" and at most {most}" if most else "")
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{wanted}, not {value!r}") from None
    if number < least or (most is not None and number > most):
        raise ValueError(f"{wanted}, not {value!r}")
    return number
