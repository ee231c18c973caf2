"""Offline writing while the link is down: how soon it starts, how good it is, and how much the target keeps.

    python -m benchmarks.offline --prompts spec_bench.jsonl gsm8k.jsonl --count 10
    python -m benchmarks.offline --prompts spec_bench.jsonl --writers drafter --outages 5 --temperature 0.7

Each question is asked over a link that is cut after some tokens and comes back after some seconds, once for each
writer: the drafter alone (`Policy(offline="continue")`), the understudy loaded on demand ("cold"), and one that reads
along ("warm"). The target in float32 then scores the unverified text at its return, and its own text at the same place.

"1st ms" is the median time from the moment when the device knew that the target is silent (the deadline of its reply,
or the link's end) to the first offline token shown; "20th ms" from the same moment to the 20th token of those left when
the target came back: tokens withdrawn before do not count. Offline tokens are shown at a reader's pace of 20 a second,
so that the 20th cannot come before 950 ms.

Ctrl-C shows the table of the answers so far.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.baseline import plain_decode
from benchmarks.command import common_arguments, conclude
from benchmarks.links import EmulatedLink
from benchmarks.outage import Outage, OutageWatch
from benchmarks.questions import Question, as_question, read_questions
from edge_runtime.events import Finished
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from export.bundle.verifier_process import VerifierProcess
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.machine import describe_machine
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.understudy import repetitions

WRITERS = {
    "drafter": Policy(offline="continue", understudy="off"),
    "cold": Policy(),
    "warm": Policy(understudy="warm"),
}
#: of one answer: writer, seconds of the outage, result
Found = tuple[str, float, Outage]
#: verified tokens after which the link is cut
CUT_AFTER = 24
#: most tokens to score
SCORED = 128


async def answer(
    runtime: EdgeRuntime,
    link: EmulatedLink,
    prompt: list[int],
    plain: list[int],
    options: argparse.Namespace,
    outage: float,
) -> Outage:
    """Get one answer, with the link down for `outage` seconds in the middle. plain: the target's own answer."""
    watch = OutageWatch(prompt, plain)

    async def return_later() -> None:
        await asyncio.sleep(outage)
        link.silent, watch.back = False, True

    later: asyncio.Task[None] | None = None
    try:
        async for event in runtime.generate(
            prompt, max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=options.seed
        ):
            watch.see(event, time.monotonic())
            if watch.verified >= CUT_AFTER and later is None:
                link.silent = watch.cut = True
                link.cut()
                later = asyncio.create_task(return_later())
        if later:
            await later
    finally:
        if later:
            later.cancel()
    assert isinstance(event, Finished)
    return watch.end(event)


async def measure(
    verifier: VerifierProcess,
    bundle: Bundle,
    questions: Sequence[Question],
    options: argparse.Namespace,
    found: list[Found],
) -> None:
    """Add the outage of every answer that was long enough to be cut to `found`, one after the other."""
    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    console = Console(stderr=True)
    with console.status("the target's own answers"):
        plain = await plain_decode(
            verifier.address, bundle, [question.prompt for question in questions], sampling, options.max_new_tokens
        )
    asked = [(q, p.tokens) for q, p in zip(questions, plain, strict=True) if len(p.tokens) > CUT_AFTER + 8]
    async with EmulatedLink(verifier.port) as link:
        for writer in options.writers:
            runtime = EdgeRuntime(bundle, link.address, RuntimeOptions(policy=WRITERS[writer], threads=options.threads))
            async with runtime:
                for outage in options.outages:
                    for question, tokens in track(asked, f"{writer}, {outage:g} s", console=console):
                        one = await answer(runtime, link, question.prompt, tokens, options, outage)
                        found.append((writer, outage, one))


class Scorer:
    """The target in float32, which scores texts."""

    def __init__(self, target: str) -> None:
        from outrider_core.models.target import load_target
        from outrider_core.targets.source import TargetSource

        self._model = load_target(TargetSource.resolve(target), "float32").model

    def nats(self, before: list[int], tokens: list[int]) -> float:
        """Return -log p per token of `tokens` after `before`, for at most SCORED tokens."""
        import torch

        tokens = tokens[:SCORED]
        with torch.inference_mode():
            logits = self._model(torch.tensor([before + tokens])).logits[0, len(before) - 1 : -1].log_softmax(-1)
            return float(-logits[torch.arange(len(tokens)), torch.tensor(tokens)].mean())


def score(found: Sequence[Found], target: str) -> None:
    """Fill in `nats` and `own_nats`."""
    console = Console(stderr=True)
    with console.status("the target is loaded, for its opinion"):
        scorer = Scorer(target)
    for _, _, outage in track(found, "the target's opinion", console=console):
        if outage.written and outage.own:
            outage.nats = scorer.nats(outage.before, outage.written)
            outage.own_nats = scorer.nats(outage.before, outage.own)


def report(found: Sequence[Found], bundle: Bundle, options: argparse.Namespace, interrupted: bool) -> dict[str, Any]:
    rows = []
    for writer in options.writers:
        for seconds in options.outages:
            mine = [outage for who, long, outage in found if (who, long) == (writer, seconds)]
            if not mine:
                continue
            written = [outage for outage in mine if outage.written and outage.own]
            theirs = [outage.nats for outage in written if outage.nats is not None]
            own = [outage.own_nats for outage in written if outage.own_nats is not None]
            tokens = sum(outage.provisional for outage in mine)
            rows.append(
                {
                    "writer": writer,
                    "seconds": seconds,
                    "answers": len(mine),
                    "same_text_as_plain_decoding": sum(outage.same for outage in mine),
                    "written": tokens,
                    "by_understudy": sum(outage.understudy for outage in mine),
                    "kept_share": round(sum(outage.kept for outage in mine) / max(1, tokens), 3),
                    "first_ms": _milliseconds([outage.first for outage in mine]),
                    "twentieth_ms": _milliseconds([outage.twentieth for outage in mine]),
                    "loops": round(sum(bool(_loops(outage.written)) for outage in written) / max(1, len(written)), 3),
                    "perplexity": round(math.exp(fmean(theirs)), 2) if theirs else None,
                    "own_perplexity": round(math.exp(fmean(own)), 2) if own else None,
                }
            )
    understudy = bundle.manifest.understudy
    return {
        "machine": describe_machine(),
        "target": f"{bundle.manifest.target} {options.dtype or ''}".strip(),
        "understudy": f"{understudy.name}, {understudy.bits} bits" if understudy else None,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "interrupted": interrupted,
        "rows": rows,
    }


def _milliseconds(seconds: Sequence[float | None]) -> int | None:
    known = [value for value in seconds if value is not None]
    return round(1e3 * median(known)) if known else None


def _loops(written: list[int]) -> bool:
    """Return whether some token continues a repetition."""
    return any(token in repetitions(written[:end]) for end, token in enumerate(written))


def show(figures: dict[str, Any], console: Console) -> None:
    title = f"Written alone: {figures['target']}; understudy: {figures['understudy']}"
    table = Table(title=title, title_justify="left", box=SIMPLE, collapse_padding=True, pad_edge=False)
    names = ("writer", "s", "tokens", "own", "kept", "1st ms", "20th ms", "loops", "ppl", "target")
    for name in names:
        table.add_column(name, justify="left" if name == "writer" else "right")
    keys = ("writer", "seconds", "written", "by_understudy", "kept_share", "first_ms", "twentieth_ms", "loops")
    for row in figures["rows"]:
        cells = (row[key] for key in (*keys, "perplexity", "own_perplexity"))
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    console.print(table)
    same, answers = (sum(row[name] for row in figures["rows"]) for name in ("same_text_as_plain_decoding", "answers"))
    console.print(f"{same} of {answers} answers are plain decoding's, token for token")
    if figures["interrupted"]:
        console.print("interrupted: these answers were done by then", style="yellow")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(
        parser, "bundle", "drafter", "prompts", "threads", "seed", count=10, json=Path("build/offline.json")
    )
    parser.add_argument("--writers", nargs="+", choices=list(WRITERS), default=list(WRITERS))
    parser.add_argument("--outages", nargs="+", type=float, default=[2.0, 5.0, 20.0], metavar="SECONDS")
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--dtype", help="the verifier's target in this number format, in torch; default: its 8-bit engine"
    )
    parser.add_argument("--no-score", dest="score", action="store_false", help="leave the float32 target's opinion out")
    options = parser.parse_args(argv)
    bundle = open_bundle(options.bundle)
    longest = bundle.manifest.max_context - options.max_new_tokens
    flags = ["--dtype", options.dtype] if options.dtype else []
    verifier = VerifierProcess(options.drafter, Path("build/verifier.log"), *flags)

    def run() -> dict[str, Any]:
        questions, _ = read_questions(options.prompts, options.count, as_question(bundle), longest)
        found, interrupted = list[Found](), False
        try:
            try:
                verifier.start()
                verifier.wait_ready()
                asyncio.run(measure(verifier, bundle, questions, options, found))
            finally:
                verifier.stop()
            if options.score:
                score(found, bundle.manifest.target)
        except KeyboardInterrupt:
            if not found:
                raise
            interrupted = True
        return report(found, bundle, options, interrupted)

    console = Console()
    return conclude(run, lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    raise SystemExit(main())
