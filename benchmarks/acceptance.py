"""Acceptance length tau through the exported bundle and a real verifier.

    python -m benchmarks.acceptance --prompts questions.jsonl --count 60
    python -m benchmarks.acceptance --prompts questions.jsonl --bundle build/undrafted --target qwen3-32b/
    python -m benchmarks.acceptance --prompts questions.jsonl --turns 5     tau by turn and by context length

tau is the number of tokens committed per tree round: accepted draft tokens plus the target's own one. In a bundle
without a drafter the understudy drafts chains of --depth tokens, 16 at most, and tau is that of its chains.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.baseline import plain_decode
from benchmarks.command import VERIFIER_DTYPE, common_arguments, conclude
from benchmarks.questions import Question, as_question, read_questions
from edge_runtime.events import AnswerStats, Finished
from edge_runtime.options import FIXED_TREES, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from export.bundle.verifier_process import PLAIN_STREAMS, UNPRUNED_TREES, VerifierProcess
from outrider_core.drafting.bundle import open_bundle
from outrider_core.drafting.drafter import TreeShape
from outrider_core.drafting.row_cost import USUAL
from outrider_core.machine import describe_machine
from outrider_core.protocol.sampling import Sampling

#: least tokens of a prompt in each class of context lengths
CONTEXTS = (0, 256, 512, 1024)


async def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    bundle = open_bundle(options.bundle)
    longest = bundle.manifest.max_context - options.max_new_tokens
    questions, too_long = read_questions(options.prompts, options.count, as_question(bundle), longest)
    flags = ["--model", options.target or bundle.manifest.target, "--dtype", options.dtype]
    flags += [*UNPRUNED_TREES, *PLAIN_STREAMS]
    drafter = options.drafter if bundle.manifest.has_drafter else None
    verifier = VerifierProcess(drafter, Path("build/verifier.log"), *flags)
    shape = TreeShape(options.nodes, options.depth, options.breadth)
    answers: list[tuple[Question, int, int, AnswerStats]] = []  # with turn and least tokens of the prompt
    dialogue = Dialogue(bundle.render_chat, options.turns, longest)
    ratios: list[float] = []
    same = compared = largest = 0
    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    try:
        with console.status("starting the verifier"):
            verifier.start()
            await asyncio.to_thread(verifier.wait_ready)
        chosen = RuntimeOptions(shape=shape, lookup=not options.no_lookup)
        fixed = replace(FIXED_TREES, row_cost=options.row_cost)
        async with EdgeRuntime(bundle, verifier.address, chosen, fixed) as runtime:
            for question in track(questions, "questions", console=console):
                prompt = dialogue.ask(question)
                if options.earlier != "others" and dialogue.turn == 1:
                    runtime.forget()
                for _ in range(2 if options.earlier == "same" else 1):
                    async for event in runtime.generate(
                        prompt,
                        max_new_tokens=options.max_new_tokens,
                        temperature=options.temperature,
                        seed=options.seed,
                    ):
                        last = event
                assert isinstance(last, Finished)
                least = max(least for least in CONTEXTS if least <= len(prompt))
                answers.append((question, dialogue.turn, least, last.stats))
                dialogue.answered(last.verified)
                assert runtime.link is not None
                largest = max(largest, runtime.link.traffic.last.get("Verify", 0))
                if options.plain:
                    (plain,) = await plain_decode(verifier.address, bundle, [prompt], sampling, options.max_new_tokens)
                    ratios.append(last.stats.tokens_per_second / plain.tokens_per_second)
                    compared += 1
                    same += last.token_ids == plain.tokens
    finally:
        verifier.stop()
    drafted = bundle.manifest.has_drafter
    overall = [stats for *_, stats in answers]

    def grouped(key: Callable[[Question, int, int], Any]) -> dict[str, Any]:
        groups: dict[Any, list[AnswerStats]] = defaultdict(list)
        for question, turn, least, stats in answers:
            groups[key(question, turn, least)].append(stats)
        return {str(name): summarise(groups[name], drafted) for name in sorted(groups)}

    return {
        "machine": describe_machine(),
        "tree": {"nodes": options.nodes, "depth": options.depth, "breadth": options.breadth},
        "row_cost": options.row_cost,
        "lookup": not options.no_lookup,
        "earlier": options.earlier,
        "temperature": options.temperature,
        "dtype": options.dtype,
        "questions": len(answers),
        "skipped_too_long": too_long,
        "overall": summarise(overall, drafted),
        "by_category": grouped(lambda question, turn, least: question.group),
        "by_turn": grouped(lambda question, turn, least: turn),
        "by_context": grouped(lambda question, turn, least: least),
        "largest_verify_frame_bytes": largest,
        "speed_over_plain_median": round(statistics.median(ratios), 3) if ratios else None,
        "same_as_plain": f"{same} of {compared}" if compared else None,
    }


class Dialogue:
    """Questions of one group as the user's turns of conversations.

    render: a conversation as token ids. turns: of one conversation at most; another begins earlier with another group,
    and where a prompt would have more than `longest` tokens.
    """

    def __init__(self, render: Callable[[list[dict[str, Any]]], list[int]], turns: int, longest: int) -> None:
        self._render, self._turns, self._longest = render, turns, longest
        self._group, self._said = "", list[dict[str, Any]]()

    @property
    def turn(self) -> int:
        """The number of the last question in its conversation, from 1."""
        return (len(self._said) + 1) // 2

    def ask(self, question: Question) -> list[int]:
        """Return the token ids of the conversation with this question at its end."""
        asked = {"role": "user", "content": question.text}
        if self._said and self.turn < self._turns and question.group == self._group:
            prompt = self._render([*self._said, asked])
            if len(prompt) <= self._longest:
                self._said.append(asked)
                return prompt
        self._group, self._said = question.group, [asked]
        return question.prompt

    def answered(self, text: str) -> None:
        """Add the answer to the last question."""
        self._said.append({"role": "assistant", "content": text})


def summarise(group: list[AnswerStats], drafter: bool = True) -> dict[str, Any]:
    """Summarise answers. drafter: count its trees; else only the understudy's chains, as it reads the prompt first."""
    tokens, rounds = sum(s.tokens for s in group), sum(s.rounds for s in group)
    drafted = rounds if drafter else sum(s.chains for s in group)
    accepted = sum(s.accepted if drafter else s.chained for s in group)
    return {
        "answers": len(group),
        "tokens": tokens,
        "rounds": rounds,
        "tau": round((accepted + drafted) / max(1, drafted), 3),
        "chains": sum(s.chains for s in group),
        "bytes_up_per_round": round(sum(s.bytes_up for s in group) / max(1, rounds)),
        "bytes_down_per_round": round(sum(s.bytes_down for s in group) / max(1, rounds)),
        "draft_ms_per_round": round(1e3 * sum(s.draft_seconds for s in group) / max(1, rounds), 1),
        "verifier_ms_per_round": round(1e3 * sum(s.engine_seconds for s in group) / max(1, rounds), 1),
        "tokens_per_second": round(tokens / max(1e-9, sum(s.seconds for s in group)), 2),
        "stalls": sum(s.stalls for s in group),
    }


def show(figures: dict[str, Any], console: Console) -> None:
    tree = figures["tree"]
    title = f"{tree['nodes']}-node trees, temperature {figures['temperature']}, {figures['questions']} questions"
    table = Table(title=title, title_justify="left")
    for column in ("group", "answers", "tokens", "tau", "draft ms", "verifier ms", "tokens/s"):
        table.add_column(column, justify="left" if column == "group" else "right")
    turns = [(f"turn {turn}", row) for turn, row in figures["by_turn"].items()]
    contexts = [(f"prompts of {least} tokens or more", row) for least, row in figures["by_context"].items()]
    for name, row in [*figures["by_category"].items(), *turns, *contexts, ("all", figures["overall"])]:
        table.add_row(
            name, str(row["answers"]), str(row["tokens"]), f"{row['tau']:.2f}", f"{row['draft_ms_per_round']:.0f}",
            f"{row['verifier_ms_per_round']:.0f}", f"{row['tokens_per_second']:.1f}",
        )  # fmt: skip
    console.print(table)
    if figures["speed_over_plain_median"]:
        console.print(
            f"speed over plain decoding on the same server, median: {figures['speed_over_plain_median']:.2f}; "
            f"same tokens: {figures['same_as_plain']}"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    common_arguments(
        parser,
        "prompts",
        "bundle",
        "drafter",
        "seed",
        target=None,
        count=60,
        max_new_tokens=128,
        json=Path("build/acceptance.json"),
    )
    parser.add_argument("--dtype", **VERIFIER_DTYPE)
    parser.add_argument("--nodes", type=int, default=TreeShape.nodes)
    parser.add_argument("--depth", type=int, default=TreeShape.depth)
    parser.add_argument("--breadth", type=int, default=TreeShape.breadth)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--no-lookup", action="store_true", help="draft without lookup")
    parser.add_argument(
        "--row-cost",
        type=float,
        default=USUAL,
        metavar="SHARE",
        help=f"draft as on a device where a row more takes such a share of a step's time (default: {USUAL})",
    )
    parser.add_argument(
        "--earlier",
        choices=["none", "others", "same"],
        default="none",
        help="earlier answers that drafts may look up: none; those to the questions before; the answer to the\n"
        "same question, which is asked twice, and the second time counts",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=1,
        metavar="N",
        help="ask up to N questions of a group in one conversation, so that contexts grow (default: 1)",
    )
    parser.add_argument("--plain", action="store_true", help="also decode plainly and compare, side by side")
    options = parser.parse_args(argv)
    console = Console()
    return conclude(
        lambda: asyncio.run(measure(options, console)), lambda figures: show(figures, console), options.json, console
    )


if __name__ == "__main__":
    sys.exit(main())
