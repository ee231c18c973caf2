"""Speed of answers over real networks, by mode: a real verifier process behind an emulated link.

    python -m benchmarks.network --prompts questions.jsonl                       every profile and mode
    python -m benchmarks.network --prompts questions.jsonl --profiles wifi 4g --step-ms 60
    python -m benchmarks.network --prompts questions.jsonl --profiles 4g --sweep 2 4 8 16 32 62
    python -m benchmarks.network --prompts questions.jsonl --cuts 500             faults in place of figures
    python -m benchmarks.network --prompts questions.jsonl --packets              links of real packets, with TLS

Modes: `ahead` trees with drafting ahead; `tree` without; `stream` the target writes and streams; `plain` the same by a
verifier without lookup, one step a token; `token` a call for each token; `controller` whatever the device chooses;
`device` the drafter alone, unverified. With a bundle that carries an understudy: `controller` loads it when it is
needed, `warm` lets it read along, `no-understudy` never loads it; `drafter-first` and `understudy-first` write on the
device and let the target correct it (`prefer-device`), so that the understudy drafts a chain. --stream-by lab.colocated
also streams from a verifier that drafts by itself. The modes take turns with every question, so that a disturbance
meets all of them; a profile's outages meet all of them at the same moments of an answer, and its delays and losses are
drawn alike. Device and verifier each have half of the cores for themselves, as on machines of their own (Linux;
--shared-cores lets them share all). --step-ms makes every step of the target take at least that long, to stand for a
larger one; the tables say
so. Where a tree's step takes this machine longer than that, --dilation 4 lets link and slowed steps take four times as
long and divides what was measured by four; the runtime's own constants, such as the pace of offline writing, are not
stretched. --sweep compares the device's tree shaping with trees of fixed sizes. --cuts breaks the link at random
moments of random answers (resets and silences), compares every answer with the target's own, and fails where one
differs.

Columns: `hit` trees whose root was expanded before the verdict that made it one; `hidden` share of the drafting that is
done while a verdict is awaited; `drafting spared` how much less of it is left to do behind a verdict than without
drafting ahead.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.baseline import call_per_token
from benchmarks.command import VERIFIER_DTYPE, Figures, common_arguments, conclude
from benchmarks.cores import Cores
from benchmarks.link_faults import break_answers, harmed
from benchmarks.links import PROFILES, EmulatedLink, LabLink, Profile
from benchmarks.network_report import plot, show
from benchmarks.packets import TOKEN, FarVerifier, Laboratory, PacketLink, enter_own_network
from benchmarks.questions import as_question, read_questions
from benchmarks.slow_device import SlowEngine
from edge_runtime.events import AnswerStats, Finished, Provisional, Verified
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.tuning import LARGEST
from export.bundle.verifier_process import PLAIN_STREAMS, VerifierProcess
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.engines import open_engine
from outrider_core.machine import describe_machine
from outrider_core.protocol.tree import MAX_NODES

#: name -> options of the runtime; None: not a runtime's mode
MODES: dict[str, tuple[Policy, Pinned] | None] = {
    "ahead": (Policy(), Pinned(mode="tree", ahead=True)),
    "tree": (Policy(), Pinned(mode="tree", ahead=False)),
    "stream": (Policy(), Pinned(mode="stream")),
    "plain": (Policy(), Pinned(mode="stream")),
    "token": None,
    "controller": (Policy(), Pinned()),
    "device": (Policy(writer="device-only"), Pinned()),
    "no-understudy": (Policy(understudy="off"), Pinned()),
    "warm": (Policy(understudy="warm"), Pinned()),
    "drafter-first": (Policy("prefer-device", understudy="off"), Pinned()),
    "understudy-first": (Policy("prefer-device", understudy="warm"), Pinned()),
}
#: flags of modes that need their own verifier
VERIFIERS: dict[str, Sequence[str]] = {"plain": PLAIN_STREAMS}
#: modes for which the bundle must carry an understudy
UNDERSTUDY_MODES = {"warm", "understudy-first"}
#: modes measured by default
DEFAULT_MODES = ("ahead", "tree", "stream", "token", "controller", "device")
#: shares of its multiples are spread evenly over [0, 1)
GOLDEN_RATIO = (1 + 5**0.5) / 2


class _Pass(TypedDict, total=False):
    """Keywords of a runtime with a link."""

    token: str
    ca_file: Path


@dataclass
class Run:
    """Answers of one mode over one profile. dilation: seconds of the clock that count as one."""

    dilation: float = 1.0
    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # tokens per second of each answer
    gaps: list[float] = field(default_factory=list)  # between verified tokens, 0 within a verdict
    stats: list[AnswerStats] = field(default_factory=list)
    different: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.speeds.append(tokens / seconds)

    def figures(self, unverified: bool) -> Figures:
        stats = self.stats
        tokens = max(1, self.tokens)
        rounds = max(1, sum(s.rounds for s in stats))
        later = sum(s.ahead_rounds for s in stats)  # trees except an answer's first
        shown, hidden = sum(s.draft_seconds - s.first_draft_seconds for s in stats), sum(s.ahead_seconds for s in stats)
        gaps = np.percentile(self.gaps, [50, 95]) if self.gaps else (0.0, 0.0)
        stalls = [seconds for s in stats for seconds in s.stall_seconds]
        return {
            "tokens_per_second": round(self.tokens / self.seconds, 2),
            "answers_tokens_per_second": [round(speed, 2) for speed in self.speeds],
            "first_token_ms": round(1000 * statistics.median(self.first)) if self.first else None,
            "gap_ms": {"p50": round(1000 * float(gaps[0]), 1), "p95": round(1000 * float(gaps[1]), 1)},
            "calls_per_100_tokens": round(100 * sum(s.calls for s in stats) / tokens, 1),
            "target_steps_per_token": round(sum(s.rounds + s.streamed for s in stats) / tokens, 3),
            "bytes_up_per_token": round(sum(s.bytes_up for s in stats) / tokens),
            "bytes_down_per_token": round(sum(s.bytes_down for s in stats) / tokens),
            "tau": round(sum(s.tau * s.rounds for s in stats) / rounds, 3),
            "nodes": round(sum(s.nodes for s in stats) / rounds, 1),
            "draft_ms_per_round": round(1000 * shown / max(1, later) / self.dilation, 2),
            "drafting_while_waiting": _share(hidden, hidden + shown),
            "ahead_hit_rate": _share(sum(s.ahead_hits for s in stats), later),
            "ahead_nodes_used": _share(sum(s.ahead_used for s in stats), sum(s.ahead_nodes for s in stats)),
            "stalls": sum(s.stalls for s in stats),
            "stall_ms_p95": round(1000 * float(np.percentile(stalls, 95)) / self.dilation) if stalls else None,
            "rolled_back_per_100": round(100 * sum(s.rolled_back for s in stats) / tokens, 1),
            "unverified": unverified,
            "different_from_target": self.different,
        }


def _share(part: float, total: float) -> float | None:
    return round(part / total, 3) if total else None


class Bench:
    """Verifiers, bundle and questions; answers are measured one at a time."""

    def __init__(self, options: argparse.Namespace, stack: AsyncExitStack, console: Console) -> None:
        self.options, self.stack, self.console = options, stack, console
        self.cores = Cores() if options.shared_cores else Cores.halves()
        stack.enter_context(self.cores.of(self.cores.device))
        self.threads = options.threads or len(self.cores.device)
        self.bundle: Bundle = open_bundle(options.bundle)
        longest = self.bundle.manifest.max_context - options.max_new_tokens
        questions, _ = read_questions(options.prompts, options.count, as_question(self.bundle), longest)
        self.prompts = [question.prompt for question in questions]
        self.truth: dict[int, list[int]] = {}
        self._verifiers: dict[tuple[str, ...], VerifierProcess] = {}
        self._laboratory = stack.enter_context(Laboratory()) if options.packets else None
        #: the device's HELLO
        self.pass_: _Pass = {}
        if self._laboratory:
            self.pass_ = {"token": TOKEN, "ca_file": self._laboratory.ca_file}

    def link(self, port: int, profile: Profile | None, seed: int) -> EmulatedLink | PacketLink:
        """Open a link of `profile` to a verifier of this bench."""
        if self._laboratory:
            return PacketLink(self._laboratory, port, profile, seed, dilation=self.options.dilation)
        return EmulatedLink(port, profile, seed, dilation=self.options.dilation)

    async def verifier(self, more: Sequence[str] = (), module: str = "") -> VerifierProcess:
        """Return a verifier with these flags too, started on first use. module: runs it; "": the product's own."""
        own = (module, *more)
        if own not in self._verifiers:
            options = self.options
            flags = ["--model", options.target, "--dtype", options.dtype, *more]
            if options.step_ms:
                module = module or "benchmarks.slow_target"
                flags = ["--step-ms", str(options.dilation * options.step_ms), *flags]
            module = module or "cloud.verifier"
            log = options.json.with_name("verifier.log")
            if self._laboratory:
                process: VerifierProcess = FarVerifier(self._laboratory, options.drafter, log, *flags, module=module)
            else:
                process = VerifierProcess(options.drafter, log, *flags, module=module)
            self._verifiers[own] = process
            self.stack.callback(process.stop)
            with self.cores.of(self.cores.verifier):
                process.start()
            with self.console.status("starting a verifier"):
                await asyncio.to_thread(process.wait_ready)
        return self._verifiers[own]

    async def learn_truth(self) -> None:
        """Record the target's own answers, one step a token, over a perfect link."""
        verifier = await self.verifier(PLAIN_STREAMS)
        async with (
            self.link(verifier.port, None, 0) as link,
            EdgeRuntime(self.bundle, link.address, RuntimeOptions(**self.pass_), Pinned(mode="stream")) as runtime,
        ):
            for number in range(len(self.prompts)):
                run = Run()
                await self.answer(runtime, number, run)

    def now(self) -> float:
        """Return the seconds of the clock, divided by --dilation."""
        return time.monotonic() / self.options.dilation

    async def answer(self, runtime: EdgeRuntime, number: int, run: Run) -> Finished:
        """Answer question `number`, adding to `run`."""
        began = last = self.now()
        runtime.forget()  # so that a repeated question is not drafted from its first answer
        async for event in runtime.generate(self.prompts[number], max_new_tokens=self.options.max_new_tokens):
            now = self.now()
            if isinstance(event, Verified) or (isinstance(event, Provisional) and not runtime.link):
                count = len(event.tokens) if isinstance(event, Verified) else 1
                run.first += [now - began] if last == began else []
                run.gaps += [now - last] * (last != began) + [0.0] * (count - 1)
                last = now
        assert isinstance(event, Finished)
        run.add(len(event.token_ids), self.now() - began)
        run.stats.append(event.stats)
        if runtime.link:
            run.different += self.truth.setdefault(number, event.token_ids) != event.token_ids
        return event


async def measure(options: argparse.Namespace, console: Console) -> Figures:
    async with AsyncExitStack() as stack:
        bench = Bench(options, stack, console)
        if not bench.prompts:
            raise ValueError(f"{options.prompts}: no question fits the bundle's context")
        if (asked := UNDERSTUDY_MODES.intersection(options.modes)) and not bench.bundle.has_understudy:
            raise ValueError(f"--modes {', '.join(sorted(asked))}: {options.bundle} carries no understudy")
        await bench.learn_truth()
        if options.cuts:
            return await break_answers(bench)
        profiles = {name: await measure_profile(bench, PROFILES[name]) for name in options.profiles}
    return {
        "machine": describe_machine(), "questions": len(bench.prompts),
        "max_new_tokens": options.max_new_tokens, "dtype": options.dtype, "step_ms": options.step_ms,
        "device_step_ms": options.device_step_ms, "dilation": options.dilation, "packets": options.packets,
        "cores": str(bench.cores), "profiles": profiles,
    }  # fmt: skip


async def measure_profile(bench: Bench, profile: Profile) -> Figures:
    """Measure every mode over one profile, in turns."""
    options = bench.options
    variants, shapes = {name: MODES[name] for name in options.modes}, dict[str, TreeShape]()
    for nodes in options.sweep:
        shapes[f"{nodes} nodes"] = TreeShape(nodes=nodes, depth=min(TreeShape.depth, nodes))
        variants[f"{nodes} nodes"] = (Policy(), Pinned(mode="tree", ahead=False, shaping=False))
    variants |= {module: (Policy(), Pinned(mode="stream")) for module in options.stream_by}
    runs = {name: Run(options.dilation) for name in variants}
    async with AsyncExitStack() as stack:
        runtimes: dict[str, EdgeRuntime] = {}
        links: dict[str, LabLink] = {}
        for name, settings in variants.items():
            module = name if name in options.stream_by else ""
            port = (await bench.verifier(VERIFIERS.get(name, ()), module)).port
            link = links[name] = await stack.enter_async_context(bench.link(port, profile, options.seed))
            if settings is None:
                continue
            engine = SlowEngine(
                open_engine(bench.bundle, None, bench.threads), options.dilation * options.device_step_ms / 1000
            )
            policy, pinned = settings
            chosen = RuntimeOptions(
                policy=policy, engine=engine, shape=shapes.get(name, TreeShape(nodes=options.nodes)),
                idle=math.inf,  # the others' turns may take minutes
                **bench.pass_,
            )  # fmt: skip
            runtime = runtimes[name] = await stack.enter_async_context(
                EdgeRuntime(bench.bundle, link.address, chosen, pinned)
            )
            async with asyncio.timeout(60 * options.dilation):  # dialling is not part of an answer
                while runtime.link and not runtime.link.welcome:
                    await asyncio.sleep(0.01)
        with Progress(console=bench.console, transient=True) as progress:
            bar = progress.add_task(profile.name, total=len(bench.prompts) * options.repeats * len(variants))
            rng = random.Random(options.seed)
            for turn in range(len(bench.prompts) * options.repeats):
                number, phase = turn % len(bench.prompts), turn * GOLDEN_RATIO % 1
                for name in rng.sample(list(variants), len(variants)):
                    async with links[name].weather(phase):
                        if name in runtimes:
                            await bench.answer(runtimes[name], number, runs[name])
                        else:
                            await per_token(bench, links[name], number, runs[name])
                    progress.advance(bar)
    return {name: run.figures(name == "device") for name, run in runs.items()}


async def per_token(bench: Bench, link: LabLink, number: int, run: Run) -> None:
    """Make one call for each token, as a client without drafter and streaming does."""
    options, dilation = bench.options, bench.options.dilation
    answer = await call_per_token(
        link.address, bench.bundle, bench.prompts[number], options.max_new_tokens, 10 * dilation, **bench.pass_
    )
    seconds, first, tokens = answer.seconds / dilation, answer.first_token_seconds / dilation, len(answer.tokens)
    run.add(tokens, seconds)
    run.first.append(first)
    run.gaps += [(seconds - first) / max(1, tokens - 1)]
    run.stats.append(
        AnswerStats(
            tokens=tokens, calls=answer.calls, streamed=tokens, bytes_up=answer.bytes_up, bytes_down=answer.bytes_down
        )
    )
    run.different += answer.tokens != bench.truth[number]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(
        parser,
        "prompts",
        "target",
        "bundle",
        "drafter",
        "seed",
        count=6,
        max_new_tokens=96,
        json=Path("build/network.json"),
    )
    parser.add_argument("--dtype", **VERIFIER_DTYPE)
    parser.add_argument(
        "--profiles",
        nargs="+",
        default=list(PROFILES),
        choices=list(PROFILES),
        metavar="NAME",
        help=f"of {', '.join(PROFILES)}; default: all",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(DEFAULT_MODES),
        choices=list(MODES),
        metavar="NAME",
        help=f"of {', '.join(MODES)}; default: {', '.join(DEFAULT_MODES)}",
    )
    parser.add_argument(
        "--sweep",
        type=int,
        nargs="+",
        default=[],
        metavar="NODES",
        help=f"also trees of these fixed sizes, 1..{MAX_NODES}",
    )
    parser.add_argument(
        "--stream-by",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="also stream from verifiers that these modules run, such as lab.colocated, which drafts beside the target",
    )
    parser.add_argument("--cuts", type=int, default=0, metavar="N", help="break the link N times instead of measuring")
    parser.add_argument(
        "--understudy",
        choices=("off", "cold", "warm"),
        default="cold",
        help="with --cuts: another offline writer, if the bundle carries an understudy",
    )
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="with --cuts: so many answers at once")
    parser.add_argument(
        "--packets",
        action="store_true",
        help="links of real packets between two network namespaces, with TLS (Linux; needs the right to make them)",
    )
    parser.add_argument("--step-ms", type=float, default=0.0, help="let the target's steps take at least this long")
    parser.add_argument(
        "--device-step-ms",
        type=float,
        default=0.0,
        help="let the drafter's steps take at least this long, however many rows they have",
    )
    parser.add_argument(
        "--dilation",
        type=float,
        default=1.0,
        metavar="N",
        help="let link and slowed steps take N times as long, and divide times by N",
    )
    parser.add_argument("--nodes", type=int, default=LARGEST.nodes, help="of the largest trees")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="of the drafter's engine, 0: all of its cores")
    parser.add_argument("--shared-cores", action="store_true", help="let device and verifier take each other's cores")
    parser.add_argument("--plot", type=Path, default=None, help="where a picture goes (needs matplotlib)")
    options = parser.parse_args(argv)
    if options.devices < 1:
        parser.error("--devices must be 1 or more")
    if options.dilation < 1:
        parser.error("--dilation must be 1 or more")
    if options.cuts and options.dilation != 1:
        parser.error("--cuts measures no speed: leave --dilation out")
    if options.packets:
        enter_own_network([sys.executable, "-m", "benchmarks.network", *(sys.argv[1:] if argv is None else argv)])
    console = Console(width=None if sys.stdout.isatty() else 140)

    bad: list[int] = []

    def show_all(figures: Figures) -> None:
        show(figures, console)
        bad.append(harmed(figures))
        if options.plot and "profiles" in figures:
            plot(figures, options.plot)

    return conclude(lambda: asyncio.run(measure(options, console)), show_all, options.json, console) or int(any(bad))


if __name__ == "__main__":
    sys.exit(main())
