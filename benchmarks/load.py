"""Load a real verifier process with simulated devices and check every verdict.

The target's own greedy answers to the prompts are recorded first. Devices then ask for the same answers with trees
that hold the true continuation to a random depth, so no drafter takes processor time, and every verdict is compared
with the truth: one wrong token anywhere and the exit status is 1. (In bfloat16 and float16 near-ties may fall either
way; a strict run is a float32 run.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.load_device import FAULTS, Answer, Device, Dial, Habits, Refusal, describe, record
from benchmarks.load_hostile import KINDS, Orders
from benchmarks.load_report import MEGA, Figures, Memory, Tally, compare, show
from benchmarks.provenance import provenance
from edge_runtime.link.address import verifier_url
from export.bundle.verifier_process import VerifierProcess
from export.quiet import quiet
from outrider_core.arguments import positive_int
from outrider_core.machine import describe_machine

EXAMPLES = """
examples:
  A sweep over the default target on two server threads:
    python -m benchmarks.load --devices 1,4,16 --seconds 30 -- --threads 2

  Devices behind a mobile link that read their answers:
    python -m benchmarks.load --devices 8 --rtt 60 --jitter 20 --think 5

  A soak: does the verifier's memory grow? Look at `MB/minute`, second half:
    python -m benchmarks.load --devices 8 --seconds 600

  What a thousand idle sockets cost, and what hostile clients do to the others:
    python -m benchmarks.load --idle 1000 --devices 4 --bad flood,slow,big,half-open
  (On a machine with few cores a flooding client also takes processor time: see the last line of the table.)

  A verifier that already runs (--pid for its memory, where it is on this machine):
    python -m benchmarks.load --address verifier.example:443 --tls-ca ca.pem --token "$TOKEN" --devices 4

Everything behind `--` goes to `python -m cloud.verifier`; see its --help.
"""
PROMPTS = Path(__file__).resolve().parent.parent / "export" / "prompts.txt"
DRAFTER = Path("drafters/smollm2-135m-instruct-moa")
LOG = Path("build/load-verifier.log")
#: answers recorded at once, and idle sockets opened at once
TOGETHER = 8
#: seconds at the start of a phase that do not count, while its devices connect
WARM_UP = 1.0
#: seconds for the devices of a phase to finish their round when it ends
WIND_DOWN = 20.0
#: seconds until memory has settled after opening or closing idle sockets
SETTLE = 2.0


@dataclass
class Stage:
    """State shared by all phases. server: None if it was not started here; memory: None if its pid is unknown."""

    options: argparse.Namespace
    console: Console
    dial: Dial
    habits: Habits
    answers: list[Answer]
    server: VerifierProcess | None
    memory: Memory | None

    def check_server(self) -> None:
        """Raise RuntimeError with the last line of its log if the verifier has ended."""
        if self.server is not None and self.server.process is not None and self.server.process.poll() is not None:
            self.server.is_ready()


async def measure(options: argparse.Namespace, verifier_flags: list[str], console: Console) -> Figures:
    """Run all of it. Raises RuntimeError, ValueError, FAULTS or Refusal with one clear line."""
    whole = asyncio.current_task()
    assert whole is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, whole.cancel)  # clean up as for Ctrl-C
    sockets = raise_file_limit()
    if options.idle > sockets - 100:
        raise ValueError(f"--idle {options.idle} needs more open files than the {sockets} allowed; see `ulimit -n`")
    habits = Habits(
        options.nodes, options.accepted, options.tokens, options.think, options.rtt / 1e3, options.jitter / 1e3
    )
    with console.status("reading target and drafter"):
        prompts, target_hash, drafter_hash = await asyncio.to_thread(read_prompts, options)
    async with AsyncExitStack() as stack:
        server = None
        if options.address is None:
            server = await stack.enter_async_context(running(options, verifier_flags, console))
        scheme = "wss" if options.tls_ca else "ws"
        address = options.address if server is None else server.address
        url = verifier_url(address if "://" in address else f"{scheme}://{address}")
        dial = Dial(url, target_hash, drafter_hash, options.token, options.tls_ca)
        pid = server.process.pid if server is not None and server.process is not None else options.pid
        memory = Memory(pid, options.sample) if pid else None
        if memory is not None:
            memory.sample()  # at once, so that a wrong --pid is reported now
            watch = asyncio.create_task(memory.watch())
            stack.callback(watch.cancel)
        answers = await record_all(dial, prompts, habits, console)
        stage = Stage(options, console, dial, habits, answers, server, memory)
        idle = await measure_idle(stage, options.idle) if options.idle else None
        phases: list[Figures] = []
        for devices in options.devices:
            alone = await run_phase(stage, devices, None)
            phases.append(alone)
            for bad in options.bad:
                beside = await run_phase(stage, devices, bad)
                phases.append({**beside, "ratios": compare(alone, beside)})
        return {
            "machine": describe_machine(),
            "cores": os.cpu_count() or 1,
            "target_hash": target_hash,
            "address": address if server is None else None,
            "verifier_flags": verifier_flags,
            "options": msgspec.to_builtins(habits) | {"seed": options.seed},
            "recorded": {
                "answers": len(answers),
                "tokens": sum(len(answer.truth) for answer in answers),
                "left_out_too_long": len(prompts) - len(answers),
            },
            "idle": idle,
            "phases": phases,
            "wrong_verdicts": sum(phase["wrong_verdicts"] for phase in phases),
            "wrong_tokens": sum(phase["wrong_tokens"] for phase in phases),
            "memory": memory.summary() if memory is not None else None,
        }


def raise_file_limit() -> int:
    """Raise this process's and its verifier's limit of open files as far as possible; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(soft, hard)


def read_prompts(options: argparse.Namespace) -> tuple[list[list[int]], str, str]:
    """Return (token ids of `--count` prompts spread evenly over the file, target hash, drafter hash)."""
    with quiet():  # late imports: wrong flags and --help are answered at once
        from export.train.prompts import read_prompts as read_lines
        from outrider_core.models.drafter_arrays import read_drafter
        from outrider_core.models.target import open_target
        from outrider_core.targets.source import TargetSource

        files = open_target(TargetSource.resolve(options.model))
    lines = read_lines([options.prompts])
    if not lines:
        raise ValueError(f"{options.prompts} holds no prompts; write one a line")
    drafter_hash = read_drafter(options.drafter.expanduser())[2]
    prompts = []
    for line in lines[:: max(1, len(lines) // options.count)][: options.count]:
        chat = [{"role": "user", "content": line[0]}]
        prompts.append(list(files.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)))
    return prompts, files.model_hash, drafter_hash


@asynccontextmanager
async def running(
    options: argparse.Namespace, flags: Sequence[str], console: Console
) -> AsyncIterator[VerifierProcess]:
    """Run a verifier process, stopped at the end in every case."""
    server = VerifierProcess(options.drafter, LOG, "--model", options.model, *flags)
    try:
        with console.status(f"starting the verifier; it writes to {LOG}"):
            server.start()
            await asyncio.to_thread(server.wait_ready)
        yield server
    finally:
        server.stop()


async def record_all(dial: Dial, prompts: list[list[int]], habits: Habits, console: Console) -> list[Answer]:
    """Return the target's answers to all prompts that leave room in the context for an answer and a tree."""
    async with dial.open() as (_, welcome):
        pass
    if habits.nodes > welcome.max_nodes:
        raise ValueError(f"--nodes {habits.nodes} is more than this verifier takes; use at most {welcome.max_nodes}")
    # tokens after an answer's end, so that the known text is long enough for every tree
    max_new = habits.tokens + habits.nodes + 1
    fitting = [prompt for prompt in prompts if len(prompt) + max_new + habits.nodes <= welcome.max_context]
    if not fitting:
        raise ValueError(
            f"no prompt and answer of {max_new} tokens fit the verifier's context of {welcome.max_context}; "
            "lower --tokens"
        )
    gate = asyncio.Semaphore(TOGETHER)
    with bar(console, "recording the target's own answers", len(fitting)) as progress:

        async def one(prompt: list[int]) -> Answer:
            async with gate:
                answer = await record(dial, prompt, max_new)
            progress.advance(progress.task_ids[0])
            return answer

        return list(await asyncio.gather(*(one(prompt) for prompt in fitting)))


@contextmanager
def bar(console: Console, text: str, total: float) -> Iterator[Progress]:
    """Show a progress bar with one task."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console) as progress:
        progress.add_task(text, total=total, note="")
        yield progress


async def measure_idle(stage: Stage, count: int) -> Figures:
    """Measure the verifier's resident memory for `count` idle connections after their handshake."""
    memory = stage.memory
    assert memory is not None  # main() has checked
    gate, close, opened = asyncio.Semaphore(TOGETHER), asyncio.Event(), 0
    await asyncio.sleep(SETTLE)
    before = memory.sample()
    with bar(stage.console, "opening idle sockets", count) as progress:

        async def one() -> None:
            nonlocal opened
            async with AsyncExitStack() as stack:
                async with gate:
                    await stack.enter_async_context(stage.dial.open())
                opened += 1
                progress.advance(progress.task_ids[0])
                await close.wait()

        tasks = [asyncio.create_task(one()) for _ in range(count)]
        try:
            while opened < count:
                stage.check_server()
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE)
            at_most = memory.sample()
            close.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(SETTLE)
    after = memory.sample()
    return {
        "sockets": count,
        "bytes_per_socket": round((at_most - before) / count),
        "before_mb": round(before / MEGA, 2),
        "open_mb": round(at_most / MEGA, 2),
        "closed_mb": round(after / MEGA, 2),
    }


async def run_phase(stage: Stage, devices: int, bad: str | None) -> Figures:
    """Run `devices` devices for `--seconds`, beside a hostile companion of the kind `bad`."""
    options = stage.options
    tally = Tally([0] * devices)
    fleet = [
        Device(stage.dial, stage.answers, stage.habits, tally, place, f"{options.seed} {devices} {place}")
        for place in range(devices)
    ]
    async with hostile(stage, bad) as counts:
        tasks = [asyncio.create_task(device.run()) for device in fleet]
        try:
            await asyncio.sleep(WARM_UP)
            tally.counting, processor, began = True, time.process_time(), time.monotonic()
            await _watch(stage, tally, tasks, began, f"{devices} devices{f' beside {bad}' if bad else ''}")
            tally.counting = False
            seconds, processor = time.monotonic() - began, time.process_time() - processor
            memory = stage.memory.summary(began) if stage.memory is not None else None
            for device in fleet:
                device.stop.set()
            await asyncio.wait(tasks, timeout=WIND_DOWN)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    stage.check_server()
    return {
        "devices": devices,
        "bad": bad,
        **tally.summary(seconds),
        "client_core_share": round(processor / seconds, 3),
        "memory": memory,
        "companion": counts,
        "ratios": None,
    }


async def _watch(stage: Stage, tally: Tally, tasks: list[asyncio.Task[None]], began: float, text: str) -> None:
    """Show the progress of a phase until its time is over. Raises the error that ended the verifier or a device."""
    seconds = stage.options.seconds
    with bar(stage.console, text, seconds) as progress:
        while (spent := time.monotonic() - began) < seconds:
            stage.check_server()
            for task in tasks:
                if task.done():
                    task.result()
            note = f"{sum(tally.tokens) / max(spent, 1e-3):.0f} tokens/s, {tally.wrong_tokens} wrong"
            progress.update(progress.task_ids[0], completed=spent, note=note)
            await asyncio.sleep(min(0.5, seconds - spent))
        progress.update(progress.task_ids[0], completed=seconds)


@asynccontextmanager
async def hostile(stage: Stage, kind: str | None) -> AsyncIterator[dict[str, int]]:
    """Run a companion process of this kind; afterwards its counts are in the yielded dict."""
    counts: dict[str, int] = {}
    if kind is None:
        yield counts
        return
    dial = stage.dial
    tls_ca = str(dial.tls_ca) if dial.tls_ca else None
    prompt = list(stage.answers[0].prompt)
    options = stage.options
    orders = Orders(
        kind,
        dial.url,
        dial.target_hash,
        dial.drafter_hash,
        options.bad_token or dial.token,
        tls_ca,
        prompt,
        f"{options.seed} {kind}",
        str(options.model),
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.load_hostile", stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        if line.strip() != b"ready":
            raise RuntimeError(f"the hostile companion {kind} did not start; its own message stands above")
        yield counts
        process.stdin.close()
        counts.update(json.loads(await asyncio.wait_for(process.stdout.readline(), 20)))
        await asyncio.wait_for(process.wait(), 20)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = make_parser()
    options, verifier_flags = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if options.address and verifier_flags:
        parser.error("--address names a verifier that runs already: leave out the flags behind --")
    if options.idle and options.address and not options.pid:
        parser.error("--idle measures the verifier's memory: with --address give its --pid too")
    if not 0 <= options.accepted <= options.nodes:
        parser.error(f"--accepted {options.accepted} does not fit trees of --nodes {options.nodes}")
    if min(options.rtt, options.jitter, options.think, options.idle) < 0:
        parser.error("--rtt, --jitter, --think and --idle must be 0 or more")
    errors, console = Console(stderr=True), Console()
    try:
        figures = asyncio.run(measure(options, verifier_flags, errors))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except (RuntimeError, ValueError, Refusal, *FAULTS) as error:
        print(f"error: {str(error) or describe(error)}", file=sys.stderr)
        return 1
    show(figures, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"run": provenance(), **figures}, indent=2) + "\n")
    console.print(f"figures: {options.json}", style="dim")
    if not all(phase["rounds"] for phase in figures["phases"]):
        print("error: a phase ended without one verdict; give it more --seconds or fewer --devices", file=sys.stderr)
        return 1
    return 1 if figures["wrong_verdicts"] else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        usage="%(prog)s [options] [-- verifier flags]",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Any = parser.add_argument
    add("--devices", type=_counts, default=[1, 4, 16], metavar="N,N", help="devices of each phase (1,4,16)")
    add("--seconds", type=_positive, default=20.0, help="length of each phase (20)")
    add("--tokens", type=positive_int, default=64, help="tokens of an answer at most (64)")
    add("--nodes", type=int, default=12, help="nodes of a tree (12)")
    add("--accepted", type=float, default=1.9, help="draft tokens accepted per verify, in the mean; tau less 1 (1.9)")
    add("--think", type=float, default=1.0, help="mean pause between two answers of a device, s, exponential (1)")
    add("--rtt", type=float, default=0.0, metavar="MS", help="simulated round trip, half of it each way (0)")
    add("--jitter", type=float, default=0.0, metavar="MS", help="up to so much more, each way (0)")
    add(
        "--bad",
        type=_kinds,
        default=[],
        metavar="KIND,KIND",
        help=f"repeat each phase beside a hostile client: {', '.join(KINDS)}",
    )
    add(
        "--idle",
        type=int,
        nargs="?",
        const=1000,
        default=0,
        metavar="N",
        help="first measure the memory of N idle connections (1000 if N is left out)",
    )
    add("--prompts", type=Path, default=PROMPTS, help="one a line, or JSONL with `prompt` or `turns` (the project's)")
    add("--count", type=positive_int, default=16, help="prompts, spread evenly over the file (16)")
    add("--seed", type=int, default=0, help="of trees, pauses and delays (0)")
    add("--model", default="smollm2-135m-instruct", help="target: alias, Hugging Face id or folder")
    add("--drafter", type=Path, default=DRAFTER, help=f"drafter folder, trained on this target ({DRAFTER})")
    add("--address", metavar="HOST:PORT", help="load this verifier instead of starting one")
    add("--pid", type=int, help="process id of the verifier at --address, for its memory")
    add("--token", default=os.environ.get("OUTRIDER_TOKEN"), help="sent as `Authorization: Bearer` ($OUTRIDER_TOKEN)")
    add("--bad-token", help="the hostile client's own token; by default it has the devices'")
    add("--tls-ca", type=Path, metavar="FILE", help="use TLS; the certificate that signed the verifier's")
    add("--sample", type=_positive, default=2.0, help="seconds between two looks at the verifier's memory (2)")
    add("--json", type=Path, default=Path("build/load.json"), help="where the figures go (build/load.json)")
    return parser


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _counts(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(KINDS)}")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
