"""Drafters side by side: one target in this process, the same questions, trees and acceptance for all.

    python -m benchmarks.drafters --prompts specbench.jsonl --count 24                        the shipped drafter
    python -m benchmarks.drafters --prompts specbench.jsonl humaneval.jsonl gsm8k.jsonl \\
        --drafters drafters/smollm2-135m-instruct-moa build/eagle2 build/lm --repeats 3 --json build/drafters.json

Every question is answered by plain decoding and by every drafter in turns, so that a disturbance meets all of them.
tau: tokens committed per verification, accepted drafts and the target's own one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.contenders import BaselineContender, Contender, MoAContender, Tables
from benchmarks.engine import machine
from cloud.engine import Segment
from cloud.features import FeatureRows
from cloud.service import Verifier, load_verifier
from cloud.sessions import Session
from cloud.settings import Settings
from edge_runtime.drafter import TreeShape
from models.moa import CONFIG_FILE, DrafterError
from models.target import TargetError, open_target
from protocol.sampling import Sampling
from protocol.tree import TokenTree
from protocol.wire import Open, pack_ids

DEFAULT_DRAFTER = Path("drafters/smollm2-135m-instruct-moa")
PREFILL = 512
Figures = dict[str, Any]


@dataclass
class Answer:
    """One answer: its tokens and what it took. Seconds without the prefill."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # drafts accepted, by round
    depths: list[int] = field(default_factory=list)  # levels drafted, by round
    nodes: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


class Lab:
    """A target that is verified on right here, without sockets or threads of its own."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.engine = verifier, verifier.engine
        self._hidden = torch.empty(0)
        self._count = 0
        self.eos = frozenset(self.engine._eos_ids)
        model = self.engine.runner.model  # type: ignore[attr-defined]
        self.device: torch.device = model.device
        model.model.norm.register_forward_hook(self._keep)

    def _keep(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        self._hidden = output[0]

    def encode(self, question: str) -> list[int]:
        chat = [{"role": "user", "content": question}]
        ids: list[int] = self.verifier.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        return list(ids)

    def open(self, prompt: list[int], sampling: Sampling, contender: Contender | None) -> Session:
        self._count += 1
        session_id = self._count.to_bytes(16, "little")
        request = Open(0, session_id, 0, pack_ids(prompt), 0, sampling)
        session = self.verifier.sessions.open(session_id, request, list(prompt), set())
        assert session is not None
        if contender and contender.producer:
            self.engine.producer = contender.producer
            session.rows = FeatureRows(contender.producer.shape)
        return session

    @torch.inference_mode()
    def answer(
        self, prompt: list[int], contender: Contender | None, sampling: Sampling, new: int, shape: TreeShape
    ) -> Answer:
        """Answer `prompt` (token ids) with one drafter, or without any."""
        answer, session = Answer(), self.open(prompt, sampling, contender)
        drafter = contender.fresh() if contender else None
        rows = bool(contender and contender.producer)
        limit = len(prompt) + new
        if not self.engine.pool.reserve(session.id, limit + shape.nodes + 1, set()):
            raise ValueError(f"{limit} tokens do not fit into the verifier's pool")
        for start in range(0, len(prompt) - 1, PREFILL):
            chain = min(PREFILL, len(prompt) - 1 - start)
            self.engine.step([Segment(session, chain, features=rows)])
            self._teach(contender, drafter, session, start, list(range(chain)))
        begun = time.perf_counter()
        while len(session.tokens) < limit and (
            len(session.tokens) == len(prompt) or session.tokens[-1] not in self.eos
        ):
            at = time.perf_counter()
            room = limit - len(session.tokens) - 1
            fitted = TreeShape(shape.nodes, max(1, min(shape.depth, room)), shape.breadth)
            tree = drafter.grow(session.tokens, sampling, fitted) if drafter and room else TokenTree()
            drafted = time.perf_counter()
            base = len(session.tokens)
            [walked] = self.engine.step([Segment(session, 1, tree, rows)])
            verified = time.perf_counter()
            assert walked is not None
            self._teach(contender, drafter, session, base - 1, [0, *(1 + node for node in walked.accepted)])
            answer.accepted.append(len(walked.accepted))
            answer.depths.append(max(tree.depths, default=0))
            answer.nodes += len(tree)
            answer.draft_seconds += drafted - at + time.perf_counter() - verified
            answer.verify_seconds += verified - drafted
        answer.seconds = time.perf_counter() - begun
        answer.tokens = session.tokens[len(prompt) :]
        self.verifier.sessions.forget(session.id)
        return answer

    def _teach(
        self, contender: Contender | None, drafter: Any, session: Session, start: int, places: list[int]
    ) -> None:
        """Give the drafter what the last step knows of positions start..: they stood at `places` of its row."""
        if contender is None:
            return
        hidden: NDArray[np.float32] = self._hidden[places].float().cpu().numpy()
        packed = session.rows.block(start, session.rows.stop) if contender.producer else b""
        contender.learn(drafter, start, packed, hidden)


def read_questions(paths: list[Path], count: int) -> list[tuple[str, str]]:
    """(group, question): `count` of each file, spread evenly over it; the group is its category or the file's name."""
    questions = []
    for path in paths:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        if not rows:
            raise ValueError(f"{path} holds no question")
        step = max(1, len(rows) // count) if count else 1
        for row in rows[::step][: count or None]:
            question = row.get("prompt") or row.get("question") or row["turns"][0]
            questions.append((row.get("category", path.stem.split("_")[0]), question))
    return questions


def measure(
    lab: Lab, contenders: list[Contender], questions: list[tuple[str, list[int]]], sampling: Sampling, shape: TreeShape,
    new: int, repeats: int, console: Console,
) -> Figures:  # fmt: skip
    """Figures by drafter and group."""
    answers: dict[tuple[str, str], list[list[Answer]]] = defaultdict(list)
    entries: list[Contender | None] = [None, *contenders]
    different = dict.fromkeys((c.name for c in contenders), 0)
    for number, (group, prompt) in enumerate(track(questions, "questions", console=console)):
        runs: dict[str, list[Answer]] = defaultdict(list)
        for repeat in range(repeats):
            turn = (number + repeat) % len(entries)
            for contender in entries[turn:] + entries[:turn]:
                name = contender.name if contender else "plain"
                runs[name].append(lab.answer(prompt, contender, sampling, new, shape))
        for name, repeated in runs.items():
            answers[name, group].append(repeated)
            if name != "plain":
                different[name] += repeated[0].tokens != runs["plain"][0].tokens
    groups = list(dict.fromkeys(group for group, _ in questions))
    table = {
        name: {group: summarise(answers[name, group], answers["plain", group]) for group in groups}
        for name in ["plain", *different]
    }
    for name, by_group in table.items():
        every = [each for group in groups for each in answers[name, group]]
        plain = [each for group in groups for each in answers["plain", group]]
        means = {key: statistics.fmean(by_group[group][key] for group in groups) for key in ("tau", "speedup")}
        by_group["mean"] = summarise(every, plain) | {key: round(value, 3) for key, value in means.items()}
    return {"drafters": table, "different_from_plain": different, "questions": len(questions)}


def summarise(answers: list[list[Answer]], plain: list[list[Answer]]) -> Figures:
    """Over questions; times are the median of a question's repeats."""
    first = [repeated[0] for repeated in answers]
    tokens, rounds = sum(len(a.tokens) for a in first), sum(len(a.accepted) for a in first)
    seconds = sum(statistics.median(a.seconds for a in repeated) for repeated in answers)
    plain_tokens = sum(len(repeated[0].tokens) for repeated in plain)
    plain_seconds = sum(statistics.median(a.seconds for a in repeated) for repeated in plain)
    reached = [sum(a > d and d < D for x in first for a, D in zip(x.accepted, x.depths, strict=True)) for d in range(8)]
    tried = [sum(a >= d and d < D for x in first for a, D in zip(x.accepted, x.depths, strict=True)) for d in range(8)]
    return {
        "questions": len(first),
        "tokens": tokens,
        "tau": round(tokens / rounds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "speedup": round((tokens / seconds) / (plain_tokens / plain_seconds), 3),
        "draft_ms": round(1000 * sum(a.draft_seconds for a in first) / rounds, 2),
        "verify_ms": round(1000 * sum(a.verify_seconds for a in first) / rounds, 2),
        "nodes": round(sum(a.nodes for a in first) / rounds, 1),
        "accepted_by_depth": [round(r / t, 3) if t else None for r, t in zip(reached, tried, strict=True)],
    }


def as_markdown(figures: Figures) -> str:
    """tau (speed over plain decoding), by group and drafter."""
    drafters = figures["drafters"]
    names = [name for name in drafters if name != "plain"]
    groups = list(drafters["plain"])
    lines = ["| group | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for group in groups:
        cells = [f"{drafters[name][group]['tau']:.2f} ({drafters[name][group]['speedup']:.2f}x)" for name in names]
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def show(figures: Figures, title: str, console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("drafter", "group", "tau", "over plain", "tokens/s", "draft ms", "verify ms", "nodes"):
        table.add_column(column, justify="left" if column in ("drafter", "group") else "right")
    for name, by_group in figures["drafters"].items():
        for group, row in by_group.items():
            table.add_row(
                name, group, f"{row['tau']:.2f}", f"{row['speedup']:.2f}", f"{row['tokens_per_second']:.1f}",
                f"{row['draft_ms']:.1f}", f"{row['verify_ms']:.1f}", f"{row['nodes']:.0f}", end_section=group == "mean",
            )  # fmt: skip
    console.print(table)
    console.print(f"answers that differ from plain decoding: {figures['different_from_plain']}", style="dim")


def open_contender(folder: Path, tables: Tables, lookup: bool) -> Contender:
    """The drafter in `folder`, by its kind; its name is the folder's."""
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise DrafterError(f"{folder}: no {CONFIG_FILE} there, so this is not a drafter folder")
    kind = json.loads(config.read_text()).get("type", "moa")
    if kind == "moa":
        return MoAContender(folder.name, folder, tables, lookup=lookup)
    return BaselineContender(folder.name, folder, tables)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL: `turns`, `prompt` or `question`")
    parser.add_argument("--drafters", type=Path, nargs="+", default=[DEFAULT_DRAFTER], help="drafter folders")
    parser.add_argument("--target", default=Settings.model_fields["model"].default)
    parser.add_argument("--count", type=int, default=24, help="questions of each file, spread evenly; 0: all")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=62)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--breadth", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lookup", action="store_true", help="mix prompt lookup into MoA's trees, as the product does")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every answer, of which the median counts")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0: all cores")
    parser.add_argument("--json", type=Path, default=Path("build/drafters.json"), help="where the figures go")
    options = parser.parse_args(argv)
    console = Console()
    try:
        figures = run(options, console)
    except (DrafterError, TargetError, OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(figures, indent=2) + "\n")
    show(figures, f"{options.nodes}-node trees, T = {options.temperature:g}, {figures['machine']}", console)
    print(as_markdown(figures))
    console.print(f"figures: {options.json}", style="dim")
    return 0


def run(options: argparse.Namespace, console: Console) -> Figures:
    threads = options.threads or torch.get_num_threads()
    moa = next((f for f in options.drafters if "moa" in json.loads((f / CONFIG_FILE).read_text())["type"]), None)
    settings = Settings(
        model=options.target, drafter=moa or DEFAULT_DRAFTER, dtype=options.dtype, device=options.device,
        threads=threads, tree_budget=options.nodes, max_nodes=128, max_sessions=4, kv_tokens=8192,
    )  # fmt: skip
    lab = Lab(load_verifier(settings))
    tables = open_target(options.target).tables()
    contenders = [open_contender(folder, tables, options.lookup) for folder in options.drafters]
    questions = []
    for group, question in read_questions(options.prompts, options.count):
        prompt = lab.encode(question)
        if len(prompt) + options.max_new_tokens + options.nodes < lab.verifier.max_context:
            questions.append((group, prompt))
    if not questions:
        raise ValueError("no question fits into the context")
    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    shape = TreeShape(options.nodes, options.depth, options.breadth)
    figures = measure(
        lab, contenders, questions, sampling, shape, options.max_new_tokens, options.repeats, console
    )  # fmt: skip
    given = {key: value for key, value in vars(options).items() if key not in ("json", "prompts", "drafters")}
    return {"machine": machine(lab.device), "options": given, **figures}


if __name__ == "__main__":
    sys.exit(main())
