"""A common `/metrics` for a fleet: the proxy sends a scrape to any replica, so each collects the reports of all."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from cloud.telemetry import log

HUB = "outrider-metrics"
#: reports older than this are left out: their replica is gone
FRESH_SECONDS = 30.0
#: most seconds that a replica's start waits for the hub
HUB_SECONDS = 5.0
DIFFER = "replicas behind this address differ in arithmetic: an answer cannot continue on another one"
_SERVED = re.compile(rb"^outrider:build_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SAMPLE = re.compile(rb"([^\s{]+)(?:\{(.*)\})? (\S+)")


class Hub:
    """A Ray actor that keeps each replica's last report."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, bytes]] = {}

    def put(self, replica: str, text: bytes) -> None:
        """Store a replica's report."""
        self._reports[replica] = self._clock(), text

    def all(self) -> dict[str, bytes]:
        """Return the fresh reports by replica."""
        now = self._clock()
        self._reports = {name: kept for name, kept in self._reports.items() if now - kept[0] <= FRESH_SECONDS}
        return {name: text for name, (_, text) in self._reports.items()}


def merge(reports: Mapping[str, bytes]) -> bytes:
    """Merge all reports in Prometheus' text format; each sample has its replica as a label."""
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


def disagreement(reports: Mapping[str, bytes]) -> str:
    """Return why answers cannot move between these replicas (different targets, drafters or arithmetics), or ""."""
    served: dict[str, list[str]] = {}
    for replica, text in sorted(reports.items()):
        if found := _SERVED.search(text):
            labels = dict(_LABEL.findall(found[1].decode()))
            what = ", ".join(f"{name} {labels.get(name, 'unknown')}" for name in ("target", "drafter", "arithmetic"))
            served.setdefault(what, []).append(replica)
    if len(served) < 2:
        return ""
    return "; ".join(f"{what} on {' and '.join(replicas)}" for what, replicas in served.items())


class FleetMetrics:
    """The metrics of one replica in a fleet. own: its own report."""

    def __init__(self, replica: str, own: Callable[[], bytes]) -> None:
        self._replica, self._own = replica, own
        self._compared = False

    def report(self) -> None:
        """Send the report to the hub without waiting; the first time compare it with those of the others."""
        _hub().put.remote(self._replica, self._own())
        if not self._compared:
            self._compared = True
            if differ := disagreement(reports_now()):
                log.error(DIFFER, served=differ)

    async def text(self) -> bytes:
        """Return the whole fleet's report; this replica's alone if the hub does not answer."""
        own = self._own()
        try:
            reports = await _hub().all.remote()
        except Exception:  # Ray raises many kinds; a scraper wants whatever is available
            reports = {}
        return merge({**reports, self._replica: own})


def reports_now() -> dict[str, bytes]:
    """Return the fleet's fresh reports; none if the hub does not answer."""
    import ray

    try:
        reports: dict[str, bytes] = ray.get(_hub().all.remote(), timeout=HUB_SECONDS)
    except Exception:  # Ray raises many kinds, and a replica is healthy without a hub
        return {}
    return reports


def _hub() -> Any:
    """Return the fleet's hub, which the first replica starts. It outlives replicas; the driver ends it."""
    import ray

    options = {"name": HUB, "namespace": "serve", "get_if_exists": True, "lifetime": "detached", "num_cpus": 0}
    return ray.remote(Hub).options(**options).remote()


def end_hub() -> None:
    """End the hub, if there is one."""
    import ray

    with suppress(ValueError):  # no replica has started it
        ray.kill(ray.get_actor(HUB, namespace="serve"))
