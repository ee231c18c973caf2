"""Quality of a drafter's own text: the link is cut after a share of each answer, and the drafter finishes it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lab.contenders import Contender
from lab.lab import Lab
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import MAX_NODES, TokenTree

CUTS = (0.0, 0.25, 0.5, 0.75)
GREEDY = Sampling()
Figures = dict[str, Any]


@dataclass(frozen=True)
class Written:
    """An answer that was finished offline. agreed: tokens up to the first that is not the target's own."""

    tokens: list[int]
    agreed: int
    wanted: int  # tokens of the target's own continuation
    nats: float  # -log p of `tokens` under the target, summed
    solved: bool | None  # the last number is the solution; None if none is known


@torch.inference_mode()
def finish_alone(lab: Lab, contender: Contender | None, prompt: list[int], answer: list[int], cut: float) -> list[int]:
    """Return token ids that follow `prompt` and the first `cut` of `answer`; without a drafter the answer's rest."""
    kept = answer[: int(cut * len(answer))]
    if contender is None:
        return answer[len(kept) :]
    text = [*prompt, *kept]
    session, drafter = lab.open(text, GREEDY, contender), contender.fresh()
    lab.prefill(session, contender, drafter)
    lab.close(session)
    written: list[int] = []
    while len(kept) + len(written) < len(answer) and not (written and written[-1] in lab.eos):
        written.append(drafter.next_token(text + written, GREEDY)[0])
    return written


@torch.inference_mode()
def nats(lab: Lab, text: list[int], written: list[int]) -> float:
    """Return -log p of `written` after `text` under the target, summed over at most MAX_NODES tokens."""
    session = lab.open(text, GREEDY, None)
    lab.prefill(session, None, None)
    logits = lab.forward(session, TokenTree.chain(written[:MAX_NODES])).double()
    lab.close(session)
    targets = torch.tensor(written[:MAX_NODES], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum"))


def last_number(text: str) -> str | None:
    """Return the last number in a text, without thousands separators and trailing zeros; None if there is none."""
    found = re.findall(r"-?\d[\d,]*\.?\d*", text)
    return str(float(found[-1].replace(",", ""))) if found else None


def measure(
    lab: Lab,
    contenders: list[Contender],
    questions: list[tuple[list[int], str | None]],
    new: int,
    console: Console,
    cuts: Sequence[float] = CUTS,
) -> Figures:
    """Return figures by drafter ("target" writes its own) and cut. questions: prompt ids, and the solution if known."""
    written: dict[str, dict[float, list[Written]]] = {}
    for prompt, solution in track(questions, "answers finished alone", console=console):
        answer = lab.answer(prompt, None, GREEDY, new).tokens
        for contender in [None, *contenders]:
            for cut in cuts:
                tokens = finish_alone(lab, contender, prompt, answer, cut)
                kept = answer[: int(cut * len(answer))]
                rest = answer[len(kept) :]
                agreed = next((i for i, (a, b) in enumerate(zip(tokens, rest, strict=False)) if a != b), len(tokens))
                whole = lab.tokenizer.decode(kept + tokens)
                solved = None if solution is None else last_number(whole) == last_number(solution)
                name = contender.name if contender else "target"
                spent = nats(lab, prompt + kept, tokens) if tokens else 0.0
                one = Written(tokens, agreed, len(rest), spent, solved)
                written.setdefault(name, {}).setdefault(cut, []).append(one)
    return {name: {f"{cut:.2f}": summarise(each) for cut, each in by_cut.items()} for name, by_cut in written.items()}


def summarise(written: list[Written]) -> Figures:
    """Return means over answers; perplexity over all tokens written."""
    judged = [each.solved for each in written if each.solved is not None]
    tokens = sum(min(len(each.tokens), MAX_NODES) for each in written)
    return {
        "answers": len(written),
        "tokens": tokens,
        "agreed_tokens": round(float(np.mean([each.agreed for each in written])), 2),
        "agreed_share": round(float(np.mean([each.agreed / each.wanted for each in written if each.wanted])), 3),
        "perplexity": round(math.exp(sum(each.nats for each in written) / max(1, tokens)), 2),
        "solved": round(sum(judged) / len(judged), 3) if judged else None,
    }


def show(figures: Figures, console: Console) -> None:
    table = Table(title="finished alone after a share of the answer", title_justify="left")
    for column in ("drafter", "cut at", "tokens alone", "agree until", "share", "target's perplexity", "solved"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for name, by_cut in figures.items():
        for cut, row in by_cut.items():
            solved = "-" if row["solved"] is None else f"{row['solved']:.0%}"
            table.add_row(
                name, f"{float(cut):.0%}", f"{row['tokens'] / row['answers']:.0f}", f"{row['agreed_tokens']:.1f}",
                f"{row['agreed_share']:.0%}", f"{row['perplexity']:.1f}", solved, end_section=cut == f"{CUTS[-1]:.2f}",
            )  # fmt: skip
    console.print(table)
