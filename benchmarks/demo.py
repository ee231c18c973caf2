"""`make demo`: a real verifier, real questions, draft trees to look at, and a link that dies and comes back."""

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

from benchmarks.baseline import PlainAnswer, plain_decode
from benchmarks.command import common_arguments, conclude
from edge_runtime.events import Event, Finished, HandedOver, LinkState, Provisional, RolledBack, Verified
from edge_runtime.options import Pinned
from edge_runtime.runtime import EdgeRuntime
from export.bundle.verifier_process import PLAIN_STREAMS, VerifierProcess
from outrider_core.drafting.drafter import TreeShape
from outrider_core.machine import describe_machine
from outrider_core.protocol.sampling import Sampling

QUESTIONS = [
    "What is the capital of France, and what is it famous for?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain in simple words how a rainbow forms.",
]
CUT_QUESTION = "What are the benefits of regular exercise?"
MAX_NEW = 120
#: of the pinned trees: on a CPU every node costs the verifier time; a GPU has room for 32 and more
SHAPE = TreeShape(nodes=12)
DRAFTED = "green underline2"  # a token that this device proposed and the target would have written
NEXT = """
Try next:
  .venv/bin/outrider chat       talk to the same model, with both ends in one process
  .venv/bin/outrider serve      an OpenAI-style endpoint on this device, http://127.0.0.1:8766/v1
  make web && .venv/bin/outrider verifier      a page that drafts in your browser, http://127.0.0.1:8765"""
CUT_AFTER = 30  # verified tokens
ALONE = 40  # provisional tokens before the verifier is started again
BADGES = {
    "connecting": ("connecting", "dim"),
    "verified": ("● cloud-verified", "bold green"),
    "alone": ("▲ offline: the drafter is writing", "bold yellow"),
    "understudy": ("▲ offline: the understudy is writing", "bold yellow"),
    "waiting": ("○ waiting for the link", "bold red"),
}


def panel(question: str, event: Event | None, state: str, note: str, verified: Text | None = None) -> Panel:
    """Draw an answer. verified: that part of the answer, if it has its own colours."""
    body = verified.copy() if verified else Text(event.verified if event else "")
    if event is not None:
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
    """Ask for one answer with the link up."""
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


async def decode_plainly(runtime: EdgeRuntime, plain: VerifierProcess, question: str, console: Console) -> PlainAnswer:
    """Ask the full model the same question, one token a step. plain: a verifier that does not speculate."""
    prompts = [runtime.encode_prompt(question)]
    with console.status("the same question by plain decoding: the full model, one token at a time"):
        return (await plain_decode(plain.address, runtime.bundle, prompts, Sampling(), MAX_NEW))[0]


async def ask_in_trees(runtime: EdgeRuntime, question: str, console: Console) -> Finished:
    """Ask for one answer by trees, with drafted and accepted tokens shown apart from the target's own."""
    body, shown, drafted, last = Text(), "", 0, None
    with live_panel(console) as live:
        async for event in runtime.generate(question, max_new_tokens=MAX_NEW):
            last = event
            if isinstance(event, Verified):  # a verdict: the accepted path, then the target's own token
                new, own = event.verified[len(shown) :], runtime.decode(event.tokens[-1:])
                split = len(new) - len(own) if new.endswith(own) else 0
                body.append(new[:split], style=DRAFTED).append(new[split:])
                shown, drafted = event.verified, drafted + len(event.tokens) - 1
            live.update(panel(question, event, "verified", f"{drafted} tokens drafted here", body))
        assert isinstance(last, Finished)
        note = f"{drafted} of {last.stats.tokens} tokens drafted here, {last.stats.rounds} checks by the target"
        live.update(panel(question, last, "verified", note, body))
    return last


async def ask_with_cut(
    runtime: EdgeRuntime, verifier: VerifierProcess, console: Console
) -> tuple[Finished, dict[str, Any]]:
    """Ask for one answer whose verifier is killed in the middle and started again."""
    state, note, count, alone = "connecting", "", 0, 0
    killed = restarted = resumed = 0.0
    rolled_back = kept = 0
    last: Event | None = None
    draft = ""  # the longest unverified text
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
                killed, note = time.monotonic(), "the verifier was just killed"
            if killed and not restarted and (alone >= ALONE or time.monotonic() - killed > 5):
                verifier.start()
                restarted, note = time.monotonic(), f"the verifier is restarting; {alone} tokens written offline"
            if resumed:
                note = f"online again: {kept} of {alone} offline tokens kept, {rolled_back} replaced"
            live.update(panel(CUT_QUESTION, event, state, note))
    assert isinstance(last, Finished)
    stats = last.stats
    fate = f"then checked by the full model: {kept} tokens kept, {rolled_back} replaced"
    body = Text(draft, style="yellow underline")
    console.print(Panel(body, title="What the device wrote offline", title_align="left", subtitle=fate))
    if understudy := runtime.bundle.manifest.understudy:
        console.print(
            f"The drafter wrote the first words, then the understudy took over: {understudy.name} at {understudy.bits} "
            "bits. In this small default pair it is the full model itself; for a target of 8 billion parameters you "
            "would take a model of its family with 0.5 or 1 billion.",
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
    token_by_token = VerifierProcess(options.drafter, Path("build/verifier.log"), *PLAIN_STREAMS)
    console.rule("[bold]Outrider: drafted on this device, verified in the cloud")
    console.print(
        "This process is the device: it drafts trees of tokens with a small model. A second process, the verifier, "
        "runs the full model and checks each tree in one pass. A third one only decodes plainly, to compare with.\n"
        "[bold]Plain text[/] is verified: it is the full model's own. "
        "[yellow underline]Yellow underlined text[/] was written offline and is not verified yet.\n"
    )
    try:
        with console.status("starting the verifier"):
            verifier.start()
            await asyncio.to_thread(verifier.wait_ready)
            token_by_token.start()  # to compare with, one step a token
            await asyncio.to_thread(token_by_token.wait_ready)
        async with EdgeRuntime.from_bundle(
            options.bundle, verifier.address, shape=SHAPE, pinned=Pinned(mode="tree")
        ) as runtime:
            console.print(
                f"[bold]1.[/] Draft trees. [{DRAFTED}]Green tokens[/] were drafted on this device; each green run plus "
                "the next token cost one pass of the full model."
            )
            trees = await ask_in_trees(runtime, QUESTIONS[0], console)
        async with EdgeRuntime.from_bundle(options.bundle, verifier.address) as runtime:
            console.print(
                "\n[bold]2.[/] As an app asks: the device measures which is faster, drafting or the full model's own "
                "stream, and uses that."
            )
            answers, plain = [], []
            for question in QUESTIONS:  # taking turns: a machine's speed changes in the course of a minute
                answers.append(await ask(runtime, question, console))
                plain.append(await decode_plainly(runtime, token_by_token, question, console))
            console.print("\n[bold]3.[/] The verifier is killed in mid-answer, and started again later.")
            cut, outage = await ask_with_cut(runtime, verifier, console)
            plain.append(await decode_plainly(runtime, token_by_token, CUT_QUESTION, console))
    finally:
        verifier.stop()
        token_by_token.stop()
    return report(trees, answers, plain, cut, outage)


def report(
    trees: Finished, answers: list[Finished], plain: list[PlainAnswer], cut: Finished, outage: dict[str, Any]
) -> dict[str, Any]:
    stats = [answer.stats for answer in answers]
    straight = plain[: len(answers)]
    speed = sum(s.tokens for s in stats) / sum(s.seconds for s in stats)
    plain_speed = sum(len(p.tokens) for p in straight) / sum(p.seconds for p in straight)
    of_trees, rounds = trees.stats, trees.stats.rounds
    return {
        "machine": describe_machine(),
        "tokens": sum(s.tokens for s in stats),
        "streamed": sum(s.streamed for s in stats),
        "tokens_per_second": round(speed, 2),
        "plain_tokens_per_second": round(plain_speed, 2),
        "ratio_to_plain": round(speed / plain_speed, 3),
        "same_text_as_plain_decoding": [
            a.token_ids == p.tokens for a, p in zip([trees, *answers], [plain[0], *straight], strict=True)
        ],
        "trees": {
            "nodes_at_most": SHAPE.nodes,
            "tokens": of_trees.tokens,
            "rounds": rounds,
            "tau": round(of_trees.tau, 3),
            "tokens_per_second": round(of_trees.tokens_per_second, 2),
            "bytes_up_per_round": round(of_trees.bytes_up / rounds),
            "bytes_down_per_round": round(of_trees.bytes_down / rounds),
            "ms_per_round_drafting": round(1e3 * of_trees.draft_seconds / rounds, 1),
            "ms_per_round_verifier": round(1e3 * of_trees.engine_seconds / rounds, 1),
        },
        "cut": {**outage, "same_text_as_plain_decoding": cut.token_ids == plain[-1].tokens},
    }


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="What was measured in this run", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    trees, cut = figures["trees"], figures["cut"]
    same = sum(figures["same_text_as_plain_decoding"])
    rows = [
        ("trees: tokens, in checks by the target", f"{trees['tokens']} in {trees['rounds']}"),
        ("trees: tau, tokens per check", f"{trees['tau']:.2f}"),
        ("trees: bytes up / down per round", f"{trees['bytes_up_per_round']} / {trees['bytes_down_per_round']}"),
        ("trees: tokens/s", f"{trees['tokens_per_second']:.1f}"),
        ("as the device chose: tokens/s", f"{figures['tokens_per_second']:.1f}"),
        ("plain decoding, one step a token: tokens/s", f"{figures['plain_tokens_per_second']:.1f}"),
        ("the device's choice over plain decoding", f"{figures['ratio_to_plain']:.2f}"),
        (
            "answers equal to plain decoding, token for token",
            f"{same} of {len(figures['same_text_as_plain_decoding'])}",
        ),
        ("at the cut: first offline token after", f"{max(cut['stall_seconds'], default=0) * 1e3:.0f} ms"),
        (
            "written offline (by the understudy) / kept / replaced",
            f"{cut['provisional']} ({cut['by_understudy']}) / {cut['kept']} / {cut['rolled_back']}",
        ),
        ("final text after the cut equals plain decoding", "yes" if cut["same_text_as_plain_decoding"] else "NO"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    console.print(NEXT, highlight=False)


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
