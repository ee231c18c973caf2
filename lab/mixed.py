"""Drafting by the understudy: its chains beside the drafter's trees, and both mixed, by the target's acceptance.

    python -m lab.mixed --prompts specbench.jsonl --bundle build/bundle --count 12

Every row drafts along the target's own answers. "trees": the drafter's; "chains": --chain tokens of the understudy,
one after another; "both": one tree of the two; "siblings": both, and below every token of the chain the drafter's two
likeliest others. nodes: of a tree on average. tau: tokens a round. The time of a round is another question: see
`edge_runtime.speed.arms`, and `benchmarks.network --modes warm`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command import Figures, common_arguments, conclude
from benchmarks.questions import read_questions
from cloud.loading import load_verifier
from cloud.settings import Settings
from edge_runtime.answer.offline_drafter import understudy_of
from lab.contenders import MoAContender, Tables
from lab.lab import Lab
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.drafting.drafter import Draft, Drafter, TreeShape
from outrider_core.machine import describe_machine
from outrider_core.models.target import open_target
from outrider_core.protocol.rows import unpack_rows
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets.source import TargetSource
from outrider_core.targets.understudy import Decoding, Understudy

#: children that the drafter hangs below a token of a chain
SIBLINGS = 2
Way = tuple[int, ...]


def paths_of(tree: TokenTree) -> list[Way]:
    """Return the tokens on the way to every node."""
    return [tuple(tree.tokens[step] for step in tree.path(node)) for node in range(len(tree))]


def tree_of(paths: Sequence[Way]) -> TokenTree:
    """Build one tree of all these, each of which comes after those it extends."""
    nodes: dict[Way, int] = {(): ROOT}
    tokens, parents = list[int](), list[int]()
    for path in paths:
        if path not in nodes:
            nodes[path] = len(tokens)
            tokens.append(path[-1])
            parents.append(nodes[path[:-1]])
    return TokenTree(tuple(tokens), tuple(parents))


class Mixed:
    """Drafts like a `Drafter`, with an understudy. row: see the module."""

    def __init__(self, row: str, drafter: Drafter, understudy: Understudy, chain: int) -> None:
        self._row, self.drafter, self._understudy, self._chain = row, drafter, understudy, chain

    @property
    def steps(self) -> int:
        return self.drafter.steps

    def draft(self, text: list[int], sampling: Sampling, shape: TreeShape) -> Draft:
        paths = list[Way]()
        if self._row != "trees":
            chain, _ = self._understudy.draft(text, min(self._chain, shape.depth), Decoding(0, sampling))
            paths += [tuple(chain[: end + 1]) for end in range(len(chain))]
        if self._row == "siblings":
            few = replace(shape, nodes=SIBLINGS, depth=1)
            for path in paths[:-1]:
                below = self.drafter.draft([*text, *path], sampling, few).tree
                paths += [(*path, *other) for other in paths_of(below)]
        if self._row != "chains":
            paths += paths_of(self.drafter.draft(text, sampling, shape).tree)
        return Draft(tree_of(paths))


class MixedContender(MoAContender):
    """The drafter of a bundle, with the understudy of the same or another bundle."""

    def __init__(
        self, row: str, folder: Path, tables: Tables, bundle: Bundle, understudy: Understudy, chain: int
    ) -> None:
        super().__init__(row, folder, tables, bundle, lookup=True)
        self._understudy, self._chain_tokens = understudy, chain

    def fresh(self) -> Mixed:  # type: ignore[override]
        return Mixed(self.name, super().fresh(), self._understudy, self._chain_tokens)

    def learn(self, drafter: Mixed, start: int, packed: bytes, hidden: object) -> None:  # type: ignore[override]
        rows = unpack_rows(packed, self._shape)
        drafter.drafter.add_rows(np.arange(start, start + len(rows)), rows)


def measure(options: argparse.Namespace, console: Console) -> Figures:
    bundle = open_bundle(options.bundle)
    entry = bundle.manifest.understudy
    if not (bundle.has_understudy and entry):
        raise ValueError(f"{options.bundle} carries no understudy; write one that does: export bundle --understudy")
    verifier = load_verifier(
        Settings(model=options.target, drafter=options.drafter, dtype="float32", threads=options.threads)
    )
    lab = Lab(verifier)
    tables = open_target(TargetSource.resolve(options.target)).tables()
    understudy = understudy_of(bundle, options.threads)
    rows = ("trees", "chains", "both", "siblings")
    contenders = [MixedContender(row, options.drafter, tables, bundle, understudy, options.chain) for row in rows]
    longest = verifier.max_context - options.max_new_tokens
    questions, _ = read_questions(options.prompts, options.count, lab.encode, longest)
    shape = TreeShape(nodes=options.nodes)
    rounds: dict[str, list[int]] = {row: [] for row in rows}
    nodes = dict.fromkeys(rows, 0)
    for question in track(questions, "questions", console=console, transient=True):
        truth = lab.answer(question.prompt, None, Sampling(), options.max_new_tokens).tokens
        for contender in contenders:
            answer = lab.replay(question.prompt, truth, contender, shape)
            rounds[contender.name] += answer.accepted
            nodes[contender.name] += answer.nodes
    return {
        "machine": describe_machine(), "questions": len(questions), "max_new_tokens": options.max_new_tokens,
        "understudy_bits": entry.bits, "chain": options.chain, "nodes": options.nodes,
        "rows": {
            row: {"tau": round(1 + float(np.mean(of_row)), 3), "nodes": round(nodes[row] / len(of_row), 1)}
            for row, of_row in rounds.items()
        },
    }  # fmt: skip


def show(figures: Figures, console: Console) -> None:
    table = Table(box=SIMPLE, title=f"an understudy of {figures['understudy_bits']} bits", title_justify="left")
    for column in ("", "tau", "nodes"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in figures["rows"].items():
        table.add_row(name, f"{row['tau']:.2f}", f"{row['nodes']:.1f}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.mixed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(
        parser, "prompts", "target", "drafter", "bundle", "threads",
        count=12, max_new_tokens=96, json=Path("build/mixed.json"),
    )  # fmt: skip
    parser.add_argument("--chain", type=int, default=8, metavar="TOKENS", help="of the understudy's")
    parser.add_argument("--nodes", type=int, default=16, help="of the drafter's trees")
    options, console = parser.parse_args(argv), Console()
    return conclude(lambda: measure(options, console), lambda figures: show(figures, console), options.json, console)


if __name__ == "__main__":
    raise SystemExit(main())
