"""Record answers for `benchmarks.controller --recorded`: how well drafter and lookup predict each of their tokens.

    python -m benchmarks.recorded_texts --prompts spec_bench.jsonl --count 60

The bundle's understudy writes the answers, greedily. Before each token the drafter gives its likeliest ones, with the
feature rows of all tokens before. Recorded are the probability of its first choice, the rank of the true token among
its choices, and whether lookup in the text finds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.command import Figures, common_arguments, conclude
from benchmarks.questions import as_question, read_questions
from benchmarks.scenarios import CHOICES, SURE
from cloud.engine.stream_lookup import StreamLookup
from edge_runtime.answer.offline_drafter import server_half, understudy_of
from outrider_core.drafting.bundle import SERVER_HALF_FILE, UNDERSTUDY_FOLDER, open_bundle
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.drafting.engines import open_engine
from outrider_core.machine import describe_machine
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.bundle import open_target_bundle
from outrider_core.targets.understudy import Decoding

#: probability above which a stream's lookup is assumed to verify a guess
WORTH_A_ROW = 0.3


def measure(options: argparse.Namespace, console: Console) -> Figures:
    bundle = open_bundle(options.bundle)
    if not bundle.has_understudy:
        raise ValueError(f"{options.bundle} carries no understudy; write one that does: export bundle --understudy")
    model = open_target_bundle(bundle.folder / UNDERSTUDY_FOLDER).config
    features = server_half(bundle.path(SERVER_HALF_FILE), bundle, model)
    understudy, engine = understudy_of(bundle, options.threads), open_engine(bundle, None)
    longest = bundle.manifest.max_context - options.max_new_tokens
    questions, _ = read_questions(options.prompts, options.count, as_question(bundle), longest)
    answers: list[dict[str, list[int]]] = []
    for question in track(questions, "questions", console=console, transient=True):
        text, decoding = list(question.prompt), Decoding(len(question.prompt), Sampling())
        while len(text) < len(question.prompt) + options.max_new_tokens:
            understudy.read_to_write(text, decoding)
            text.append(understudy.next_token(text, decoding)[0])
            if text[-1] in bundle.manifest.eos_ids:
                break
        understudy.read(text)
        positions = range(len(text) - 1)
        rows = features.rows(understudy.gather(features.layers, positions), positions)
        answers.append(predicted(Drafter.of(bundle, engine), text, len(question.prompt), rows))
    return {"machine": describe_machine(), "answers": answers}


def predicted(drafter: Drafter, text: list[int], begin: int, rows: np.ndarray) -> dict[str, list[int]]:
    """Return predictions of the tokens of `text` from `begin` on; rows [tokens, 2, heads, head_dim]: feature rows."""
    lookup, levels, ranks, found = StreamLookup(), list[int](), list[int](), list[int]()
    drafter.add_rows(np.arange(begin - 1), rows[: begin - 1])
    for at in range(begin, len(text)):
        drafter.add_rows(np.array([at - 1]), rows[at - 1 : at])
        drafted = drafter.draft(text[:at], Sampling(), TreeShape(nodes=CHOICES, depth=1))
        first = float(np.exp(drafted.scores[0]))
        levels.append(int(np.argmin([abs(first - sure) for sure in SURE])))
        ranks.append(next((rank for rank, token in enumerate(drafted.tree.tokens) if token == text[at]), CHOICES))
        guesses = lookup.guesses(text[:at], 1)
        sent = bool(guesses) and guesses[0][1] >= WORTH_A_ROW
        right = sent and guesses[0][0] == text[at]
        lookup.observe(int(sent), int(right))
        found.append(int(right))
    return {"prompt": [begin], "levels": levels, "ranks": ranks, "looked_up": found}


def show(figures: Figures, console: Console) -> None:
    answers = figures["answers"]
    ranks = [rank for answer in answers for rank in answer["ranks"]]
    found = [hit for answer in answers for hit in answer["looked_up"]]
    first = np.mean([rank == 0 for rank in ranks])
    console.print(f"{len(answers)} answers, {len(ranks)} tokens: first choice right {first:.2f}, any choice", end=" ")
    console.print(f"{np.mean([rank < CHOICES for rank in ranks]):.2f}, found by lookup {np.mean(found):.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorded_texts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common_arguments(
        parser, "prompts", "bundle", "threads", count=60, max_new_tokens=128, json=Path("build/texts.json")
    )
    options, console = parser.parse_args(argv), Console()
    return conclude(lambda: measure(options, console), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    raise SystemExit(main())
