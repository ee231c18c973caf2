"""`make demo`: one verifier process, real questions, a link that dies in mid-answer and comes back."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from benchmarks.baseline import plain_decode
from benchmarks.command import common_arguments, conclude
from cloud.process import VerifierProcess
from edge_runtime.events import Event, Finished, HandedOver, LinkState, Provisional, RolledBack, Verified
from edge_runtime.runtime import EdgeRuntime
from outrider_core.drafting.drafter import TreeShape
from outrider_core.machine import describe_machine
from outrider_core.protocol.sampling import Sampling

QUESTIONS = [
    "What is the capital of France, and what is it famous for?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain in simple words how a rainbow forms.",
]
CUT_QUESTION = "Give me a plan for a weekend in the mountains."
MAX_NEW = 120
#: on a CPU every node costs the verifier time; a GPU has room for 32 and more
SHAPE = TreeShape(nodes=12)
CUT_AFTER = 30  # verified tokens
ALONE = 40  # provisional tokens before the verifier is started again
BADGES = {
    "connecting": ("connecting", "dim"),
    "verified": ("● cloud-verified", "bold green"),
    "alone": ("▲ link down: the drafter writes alone", "bold yellow"),
    "understudy": ("▲ link down: the understudy writes alone", "bold yellow"),
    "waiting": ("○ waiting for the link", "bold red"),
}


def panel(question: str, event: Event | None, state: str, note: str) -> Panel:
    body = Text()
    if event is not None:
        body.append(event.verified)
        body.append(event.provisional, style="yellow underline")
    badge, style = BADGES[state]
    title = Text.assemble(("You: ", "bold"), question)
    return Panel(body, title=title, title_align="left", subtitle=Text.assemble((badge, style), "  ", (note, "dim")))


@contextmanager
def live_panel(console: Console) -> Iterator[Live]:
    with Live(console=console, refresh_per_second=10) as live:
        yield live
    if not console.is_terminal:
        console.print()


async def ask(runtime: EdgeRuntime, question: str, console: Console) -> Finished:
    """One answer with the link up."""
    state, last = "connecting", None
    with live_panel(console) as live:
        async for event in runtime.generate(question, max_new_tokens=MAX_NEW):
            state = event.state if isinstance(event, LinkState) else state
            last = event
            live.update(panel(question, event, state, ""))
        assert isinstance(last, Finished)
        stats = last.stats
        note = f"{stats.tokens} tokens in {stats.rounds} rounds, {stats.tokens_per_second:.1f} tokens/s"
        live.update(panel(question, last, state, note))
    return last


async def ask_with_cut(
    runtime: EdgeRuntime, verifier: VerifierProcess, console: Console
) -> tuple[Finished, dict[str, Any]]:
    """One answer whose verifier is killed in the middle and started again."""
    state, note, count, alone = "connecting", "", 0, 0
    killed = restarted = resumed = 0.0
    rolled_back = kept = 0
    last: Event | None = None
    draft = ""  # the most that stood there unverified
    with live_panel(console) as live:
        async for event in runtime.generate(CUT_QUESTION, max_new_tokens=MAX_NEW):
            last = event
            if isinstance(event, LinkState):
                state = event.state
            if isinstance(event, HandedOver):
                state = "understudy" if event.writer == "understudy" else "alone"
            if isinstance(event, Verified):
                count += len(event.tokens)
                kept += event.confirmed
                if restarted and not resumed:
                    resumed = time.monotonic()
            if isinstance(event, Provisional):
                alone += 1
                draft = max(draft, event.provisional, key=len)
            if isinstance(event, RolledBack):
                rolled_back += event.count
            if count >= CUT_AFTER and not killed:
                verifier.kill()
                killed, note = time.monotonic(), "the verifier process was just killed"
            if killed and not restarted and (alone >= ALONE or time.monotonic() - killed > 5):
                verifier.start()
                restarted, note = time.monotonic(), f"verifier restarting; {alone} tokens written alone so far"
            if resumed:
                note = f"back: {kept} of {alone} provisional tokens kept, {rolled_back} rolled back"
            live.update(panel(CUT_QUESTION, event, state, note))
    assert isinstance(last, Finished)
    stats = last.stats
    fate = f"then checked by the full model: {kept} tokens kept, {rolled_back} rolled back"
    body = Text(draft, style="yellow underline")
    console.print(Panel(body, title="What the device wrote alone", title_align="left", subtitle=fate))
    if understudy := runtime.bundle.manifest.understudy:
        console.print(
            f"The drafter wrote the first of it; then the understudy, {understudy.name} at {understudy.bits} bits. "
            "With this small default pair these are the full model's own weights; for a target of 8 billion parameters "
            "an understudy of its family with half a billion or one would do.",
            style="dim",
            highlight=False,
        )
    return last, {
        "stall_seconds": stats.stall_seconds,
        "provisional": stats.provisional,
        "by_understudy": stats.understudy,
        "kept": stats.kept,
        "rolled_back": stats.rolled_back,
        "outage_seconds": round(restarted - killed, 3),
        "restart_to_first_verified_seconds": round(resumed - restarted, 3) if resumed else None,
    }


async def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    verifier = VerifierProcess(options.drafter, Path("build/verifier.log"))
    console.rule("[bold]Outrider: drafted on this device, verified in the cloud")
    console.print(
        "Two processes: this one drafts token trees with the small exported model, the other one (the verifier) "
        "holds the full model and checks each tree in one pass.\n"
        "[bold]Plain text[/] is verified: the full model's own words. "
        "[yellow underline]Yellow underlined text[/] was written by the device alone.\n"
        "Trees are pinned, so that they can be seen; where the target's own stream is faster, a device would choose "
        "that.\n"
    )
    try:
        with console.status("starting the verifier (the first start converts the model, about 20 s)"):
            verifier.start()
            await asyncio.to_thread(verifier.wait_ready)
        async with EdgeRuntime.from_bundle(options.bundle, verifier.address, shape=SHAPE, mode="tree") as runtime:
            console.print("[bold]1.[/] Questions with the link up")
            answers = [await ask(runtime, question, console) for question in QUESTIONS]
            prompts = [runtime.encode_prompt(question) for question in [*QUESTIONS, CUT_QUESTION]]
            with console.status("the same questions by plain decoding: the full model alone, token by token"):
                plain = await plain_decode(verifier.address, runtime.bundle, prompts, Sampling(), MAX_NEW)
            console.print("\n[bold]2.[/] The verifier dies in mid-answer (SIGKILL) and is started again later")
            cut, outage = await ask_with_cut(runtime, verifier, console)
    finally:
        verifier.stop()
    return report(answers, plain, cut, outage)


def report(answers: list[Finished], plain: list[Any], cut: Finished, outage: dict[str, Any]) -> dict[str, Any]:
    stats = [answer.stats for answer in answers]
    tokens, rounds = sum(s.tokens for s in stats), sum(s.rounds for s in stats)
    straight = plain[: len(answers)]
    speed = tokens / sum(s.seconds for s in stats)
    plain_speed = sum(len(p.tokens) for p in straight) / sum(p.seconds for p in straight)
    return {
        "machine": describe_machine(),
        "tree_nodes": SHAPE.nodes,
        "tokens": tokens,
        "rounds": rounds,
        "tau": round(sum(s.tau * s.rounds for s in stats) / rounds, 3),
        "tokens_per_second": round(speed, 2),
        "plain_tokens_per_second": round(plain_speed, 2),
        "ratio_to_plain": round(speed / plain_speed, 3),
        "bytes_up_per_round": round(sum(s.bytes_up for s in stats) / rounds),
        "bytes_down_per_round": round(sum(s.bytes_down for s in stats) / rounds),
        "ms_per_round_drafting": round(1e3 * sum(s.draft_seconds for s in stats) / rounds, 1),
        "ms_per_round_verifier": round(1e3 * sum(s.engine_seconds for s in stats) / rounds, 1),
        "same_text_as_plain_decoding": [a.token_ids == p.tokens for a, p in zip(answers, straight, strict=True)],
        "cut": {**outage, "same_text_as_plain_decoding": cut.token_ids == plain[-1].tokens},
    }


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="What was measured in this run", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    cut = figures["cut"]
    same = sum(figures["same_text_as_plain_decoding"])
    rows = [
        ("tokens, in rounds", f"{figures['tokens']} in {figures['rounds']}"),
        ("tau: tokens committed per round", f"{figures['tau']:.2f}"),
        ("tokens/s", f"{figures['tokens_per_second']:.1f}"),
        ("tokens/s, plain decoding on the same server", f"{figures['plain_tokens_per_second']:.1f}"),
        ("ratio", f"{figures['ratio_to_plain']:.2f}"),
        ("bytes up / down per round", f"{figures['bytes_up_per_round']} / {figures['bytes_down_per_round']}"),
        (
            "answers equal to plain decoding, token for token",
            f"{same} of {len(figures['same_text_as_plain_decoding'])}",
        ),
        ("at the cut: first token alone after", f"{max(cut['stall_seconds'], default=0) * 1e3:.0f} ms"),
        (
            "written alone (by the understudy) / kept / rolled back",
            f"{cut['provisional']} ({cut['by_understudy']}) / {cut['kept']} / {cut['rolled_back']}",
        ),
        ("final text after the cut equals plain decoding", "yes" if cut["same_text_as_plain_decoding"] else "NO"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    common_arguments(parser, "bundle", "drafter", json=Path("build/demo.json"))
    options = parser.parse_args(argv)
    console = Console()
    return conclude(
        lambda: asyncio.run(run(options, console)), lambda figures: show(figures, console), options.json, console
    )


if __name__ == "__main__":
    sys.exit(main())
