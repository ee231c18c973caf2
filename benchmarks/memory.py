"""Resident memory of a verifier process, when it is ready and with a session of 1,024 tokens, and of a device.

    python -m benchmarks.memory                         the default target, as `python -m cloud.verifier` starts it
    python -m benchmarks.memory -- --engine torch       options after `--` are the verifier's own

The session's text is read as one prompt, its last tokens are written one by one. A device is a separate process that
gets one short answer over a working link: without an understudy, with a cold one, which is not loaded then, and with a
warm one, which reads along (Linux). Memory is counted as the system does: pages in memory, including those of mapped
files and shared libraries.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.baseline import plain_decode
from benchmarks.command import common_arguments, conclude
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from export.bundle.verifier_process import VerifierProcess
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.protocol.sampling import Sampling

#: tokens that the target writes after the prompt
WRITTEN = 32
#: where Linux reports a process's peak; getrusage includes that of its parent
STATUS = Path("/proc/self/status")
Understudy = Literal["off", "cold", "warm"]
TEXT = "The keeper of the lighthouse wrote down what he had seen: ships, weather, birds and the colour of the sea. "


def prompt_of(bundle: Bundle, tokens: int) -> list[int]:
    """Return a text of exactly `tokens` tokens."""
    ids: list[int] = bundle.tokenizer.encode(TEXT, add_special_tokens=False).ids
    return (ids * (1 + tokens // len(ids)))[:tokens]


def device_peak(address: str, bundle: Path, understudy: Understudy) -> int:
    """Return the peak MiB of this process after an answer from the verifier at `address`."""

    async def answer() -> None:
        async with EdgeRuntime.from_bundle(bundle, address, policy=Policy(understudy=understudy)) as runtime:
            async for _ in runtime.generate(TEXT, max_new_tokens=WRITTEN):
                pass

    asyncio.run(answer())
    [peak] = (line.split()[1] for line in STATUS.read_text().splitlines() if "VmHWM" in line)
    return round(int(peak) / 2**10)


def in_its_own_process(address: str, bundle: Path, understudy: Understudy) -> int:
    """Run `device_peak` in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(device_peak, address, bundle, understudy).result()


def measure(verifier: VerifierProcess, bundle: Bundle, tokens: int) -> dict[str, Any]:
    """Start the verifier, let it hold a session of `tokens` tokens and end it; devices beside it. Sizes in MiB."""
    begun = time.perf_counter()
    verifier.start()
    try:
        verifier.wait_ready()
        ready = time.perf_counter() - begun
        assert verifier.process is not None
        process = psutil.Process(verifier.process.pid)
        idle = process.memory_info().rss
        prompt = prompt_of(bundle, tokens - WRITTEN)
        [answer] = asyncio.run(plain_decode(verifier.address, bundle, [prompt], Sampling(), WRITTEN))
        held = process.memory_info().rss
        ways = get_args(Understudy) if bundle.has_understudy else ("off",)
        peaks = {way: in_its_own_process(verifier.address, bundle.folder, way) for way in ways if STATUS.exists()}
    finally:
        verifier.stop()
    return {
        "tokens": len(prompt) + len(answer.tokens),
        "ready_seconds": round(ready, 1),
        "resident_mib_ready": round(idle / 2**20),
        "resident_mib_with_session": round(held / 2**20),
        "device_peak_mib": peaks,
    }


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="Resident memory of a verifier and of a device", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("seconds until it was ready", f"{figures['ready_seconds']:.1f}")
    table.add_row("MiB when ready", str(figures["resident_mib_ready"]))
    table.add_row(f"MiB with a session of {figures['tokens']} tokens", str(figures["resident_mib_with_session"]))
    for way, peak in figures["device_peak_mib"].items():
        table.add_row(f"MiB of a device at most, understudy {way}", str(peak))
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(parser, "bundle", "drafter", json=Path("build/memory.json"))
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the session")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="the verifier's own flags")
    options = parser.parse_args(argv)
    if options.tokens <= WRITTEN:
        parser.error(f"--tokens must be more than {WRITTEN}")
    console = Console()

    def run() -> dict[str, Any]:
        bundle = open_bundle(options.bundle)
        verifier = VerifierProcess(options.drafter, Path("build/verifier.log"), *options.flags)
        with console.status("a verifier reads a long text"):
            return {"flags": options.flags, **measure(verifier, bundle, options.tokens)}

    return conclude(run, lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    sys.exit(main())
