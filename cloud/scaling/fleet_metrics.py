"""One `/metrics` for a fleet: the proxy sends a scrape to any replica, so each knows what all of them report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

HUB = "outrider-metrics"
#: what a replica reported longer ago than this is left out: it is gone
FRESH_SECONDS = 30.0
_SAMPLE = re.compile(rb"([^\s{]+)(?:\{(.*)\})? (\S+)")


class Hub:
    """A Ray actor that keeps each replica's last report."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, bytes]] = {}

    def put(self, replica: str, text: bytes) -> None:
        """Keep what a replica reports."""
        self._reports[replica] = self._clock(), text

    def all(self) -> dict[str, bytes]:
        """The fresh reports by replica."""
        now = self._clock()
        self._reports = {name: kept for name, kept in self._reports.items() if now - kept[0] <= FRESH_SECONDS}
        return {name: text for name, (_, text) in self._reports.items()}


def merge(reports: Mapping[str, bytes]) -> bytes:
    """All reports in Prometheus' text format as one; each sample has its replica as a label."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for replica, text in sorted(reports.items()):
        label, family = b'replica="%b"' % replica.encode(), b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                family = line.split(b" ", 3)[2]
                comments, _ = families.setdefault(family, ([], []))
                if line not in comments:
                    comments.append(line)
            elif found := _SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                both = label if not labels else label + b"," + labels
                families[family][1].append(b"%b{%b} %b" % (name, both, value))
    return b"".join(line + b"\n" for comments, samples in families.values() for line in (*comments, *samples))


class FleetMetrics:
    """One replica's side. own: its own report."""

    def __init__(self, replica: str, own: Callable[[], bytes]) -> None:
        self._replica, self._own = replica, own

    def report(self) -> None:
        """Tell the hub, without waiting."""
        _hub().put.remote(self._replica, self._own())

    async def text(self) -> bytes:
        """The whole fleet's report; this replica's alone where the hub does not answer."""
        own = self._own()
        try:
            reports = await _hub().all.remote()
        except Exception:  # Ray raises many; whoever scrapes wants what there is
            reports = {}
        return merge({**reports, self._replica: own})


def _hub() -> Any:
    """The fleet's hub, which the first replica starts. It outlives replicas; the driver ends it."""
    import ray

    options = {"name": HUB, "namespace": "serve", "get_if_exists": True, "lifetime": "detached", "num_cpus": 0}
    return ray.remote(Hub).options(**options).remote()


def end_hub() -> None:
    """End the hub, if there is one."""
    import ray

    with suppress(ValueError):  # no replica has started it
        ray.kill(ray.get_actor(HUB, namespace="serve"))
