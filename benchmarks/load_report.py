"""Measurements of a load run, their summary and tables."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from outrider_core.protocol.tree import MAX_NODES
from outrider_core.protocol.wire import Verdict

Figures = dict[str, Any]
MEGA = 1e6
PERCENTS = (50, 95, 99)


@dataclass
class Tally:
    """Counts of one phase. Verdicts count while `counting`; errors and wrong tokens always.

    tokens: committed, per device. seconds: of one VERIFY, from its frame's send to its verdict; opening: of the first
    one of a conversation, from OPEN's send. queue_us, engine_us: from the verdicts.
    """

    tokens: list[int]
    counting: bool = False
    answers: int = 0
    accepted: int = 0
    seconds: list[float] = field(default_factory=list)
    opening: list[float] = field(default_factory=list)
    queue_us: list[int] = field(default_factory=list)
    engine_us: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    wrong_verdicts: int = 0
    wrong_tokens: int = 0
    least_budget: int = MAX_NODES  # the smallest tree budget that the verifier advertised to any device

    def advertised(self, budget: int) -> None:
        """Note that trees may be pruned to `budget` nodes, from a verdict or a handshake."""
        self.least_budget = min(self.least_budget, budget or MAX_NODES)

    def verdict(self, place: int, verdict: Verdict, seconds: float, first: bool) -> None:
        """Count a correct verdict."""
        if not self.counting:
            return
        self.tokens[place] += len(verdict.accepted) + 1
        self.accepted += len(verdict.accepted)
        if first:
            self.opening.append(seconds)
        else:
            self.seconds.append(seconds)
            self.queue_us.append(verdict.queue_us)
            self.engine_us.append(verdict.engine_us)

    def answer(self) -> None:
        """Count a complete answer."""
        self.answers += self.counting

    def error(self, name: str) -> None:
        self.errors[name] += 1

    def wrong(self, tokens: int) -> None:
        self.wrong_verdicts += 1
        self.wrong_tokens += tokens

    @property
    def rounds(self) -> int:
        return len(self.seconds) + len(self.opening)

    def summary(self, seconds: float) -> Figures:
        """Return figures over `seconds` of counting; times in ms."""
        tokens = sum(self.tokens)
        return {
            "seconds": round(seconds, 2),
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 2),
            "rounds": self.rounds,
            "rounds_per_second": round(self.rounds / seconds, 2),
            "answers": self.answers,
            "accepted_per_verify": round(self.accepted / self.rounds, 3) if self.rounds else None,
            "verify_ms": percentiles([1e3 * s for s in self.seconds]),
            "first_verdict_ms": percentiles([1e3 * s for s in self.opening]),
            "queue_ms": percentiles([us / 1e3 for us in self.queue_us]),
            "engine_ms": percentiles([us / 1e3 for us in self.engine_us]),
            "tokens_by_device": list(self.tokens),
            "fairness_max_over_min": round(max(self.tokens) / min(self.tokens), 3) if min(self.tokens) else None,
            "fairness_jain": round(jain(self.tokens), 4) if tokens else None,
            "errors": dict(sorted(self.errors.items())),
            "wrong_verdicts": self.wrong_verdicts,
            "wrong_tokens": self.wrong_tokens,
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return {"p50": ..., "p95": ..., "p99": ...}, or None without values."""
    if not values:
        return None
    return {f"p{p}": round(float(v), 2) for p, v in zip(PERCENTS, np.percentile(values, PERCENTS), strict=True)}


def jain(shares: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all have the same, 1/n if one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def resident_bytes(pid: int) -> int:
    """Return VmRSS of a process. Raises OSError if there is no such process or no /proc."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} shows no VmRSS: it has ended")


class Memory:
    """Resident memory of the verifier over time: (seconds, bytes) in `samples`."""

    def __init__(self, pid: int, interval: float) -> None:
        self.pid, self._interval = pid, interval
        self.samples: list[tuple[float, int]] = []

    def sample(self) -> int:
        now = resident_bytes(self.pid)
        self.samples.append((time.monotonic(), now))
        return now

    async def watch(self) -> None:
        """Take a sample every few seconds until cancelled or the process is gone."""
        try:
            while True:
                self.sample()
                await asyncio.sleep(self._interval)
        except OSError:
            return

    def summary(self, since: float = 0.0) -> Figures | None:
        """Summarise samples taken at `since` (time.monotonic) or later. Slopes by least squares, in MB a minute.

        The slope of the second half distinguishes a leak from caches that fill once.
        """
        chosen = [sample for sample in self.samples if sample[0] >= since]
        if not chosen:
            return None
        return {
            "start_mb": round(chosen[0][1] / MEGA, 2),
            "end_mb": round(chosen[-1][1] / MEGA, 2),
            "most_mb": round(max(size for _, size in chosen) / MEGA, 2),
            "mb_per_minute": slope(chosen),
            "mb_per_minute_second_half": slope(chosen[len(chosen) // 2 :]),
            "samples": [[round(at - chosen[0][0], 1), size] for at, size in chosen],
        }


def slope(samples: Sequence[tuple[float, int]]) -> float | None:
    """Return MB a minute through (seconds, bytes); None for fewer than three."""
    if len(samples) < 3:
        return None
    at, size = np.array(samples, float).T
    return round(float(np.polyfit(at - at[0], size, 1)[0]) * 60 / MEGA, 3)


def compare(alone: Figures, beside: Figures) -> dict[str, float | None]:
    """Divide figures beside a hostile companion by those without it: above 1, times grew."""
    ratios = {name: _ratio(beside["verify_ms"], alone["verify_ms"], name) for name in ("p50", "p95", "p99")}
    return {**ratios, "tokens_per_second": _ratio(beside, alone, "tokens_per_second")}


def _ratio(above: Figures | None, below: Figures | None, key: str) -> float | None:
    return round(above[key] / below[key], 3) if above and below and below[key] else None


def show(figures: Figures, console: Console) -> None:
    """Print the tables: a column per phase."""
    table = Table(title=f"Load on {figures['machine']}", title_justify="left")
    table.add_column("figure", no_wrap=True)
    phases = figures["phases"]
    if not console.is_terminal:
        console = Console(file=console.file, width=37 + 23 * max(3, len(phases)))
    for phase in phases:
        beside = f"\n+ {phase['bad']}" if phase["bad"] else ""
        table.add_column(f"{phase['devices']} device{'s' if phase['devices'] > 1 else ''}{beside}", justify="right")
    for name, cell in ROWS:
        table.add_row(name, *(cell(phase) for phase in phases))
    console.print(table)
    if idle := figures["idle"]:
        console.print(
            f"{idle['sockets']} idle sockets: {idle['bytes_per_socket'] / 1024:.1f} KiB each "
            f"({idle['before_mb']:.1f} MB before, {idle['open_mb']:.1f} MB open, {idle['closed_mb']:.1f} MB closed)"
        )
    if figures["wrong_tokens"]:
        console.print(
            f"WRONG: {figures['wrong_tokens']} tokens in {figures['wrong_verdicts']} verdicts are not the target's own"
        )
    elif phases:
        rounds = sum(phase["rounds"] for phase in phases)
        console.print(f"every one of {rounds} verdicts held the target's own tokens")


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def _split(values: dict[str, float] | None) -> str:
    return (
        " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values.values()) if values else "-"
    )


def _memory(phase: Figures) -> str:
    memory = phase["memory"]
    return f"{memory['start_mb']:.0f} -> {memory['end_mb']:.0f}" if memory else "-"


def _slopes(phase: Figures) -> str:
    memory = phase["memory"] or {"mb_per_minute": None, "mb_per_minute_second_half": None}
    return f"{_number(memory['mb_per_minute'], '+.1f')} / {_number(memory['mb_per_minute_second_half'], '+.1f')}"


def _ratios(phase: Figures) -> str:
    ratios = phase["ratios"]
    return " / ".join(_number(ratios[key], ".2f") for key in ("p50", "p95", "p99")) if ratios else "-"


def _cores(phase: Figures) -> str:
    """Return the processor time that the load itself takes, perhaps from the verifier on the same machine."""
    companion = phase["companion"].get("percent of a core")
    return f"{phase['client_core_share']:.2f} / {_number(companion and companion / 100, '.2f')}"


def _errors(phase: Figures) -> str:
    return ", ".join(f"{count} x {name}" for name, count in phase["errors"].items()) or "none"


ROWS = [
    ("committed tokens/s, all devices", lambda phase: _number(phase["tokens_per_second"])),
    ("rounds/s", lambda phase: _number(phase["rounds_per_second"])),
    ("accepted per verify", lambda phase: _number(phase["accepted_per_verify"], ".2f")),
    ("verify ms, p50 / p95 / p99", lambda phase: _split(phase["verify_ms"])),
    ("  of it waiting for the engine", lambda phase: _split(phase["queue_ms"])),
    ("  of it in the engine", lambda phase: _split(phase["engine_ms"])),
    ("OPEN to first verdict ms", lambda phase: _split(phase["first_verdict_ms"])),
    ("verify, over the phase without", _ratios),
    ("tokens by device, max / min", lambda phase: _number(phase["fairness_max_over_min"], ".2f")),
    ("Jain's fairness index", lambda phase: _number(phase["fairness_jain"], ".3f")),
    ("errors", _errors),
    ("wrong tokens", lambda phase: str(phase["wrong_tokens"])),
    ("verifier's memory, MB", _memory),
    ("MB/minute, all / second half", _slopes),
    ("this process / companion, cores", _cores),
]
