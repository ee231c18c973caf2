"""A small understudy, and what Python's runner and sampler make of it, for the ports' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.bundle import open_target_bundle
from outrider_core.targets.part import Part
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.understudy import Decoding, Understudy
from tests.edge_runtime.test_probe import tiny_bundle
from tests.targets.test_understudy import source_of, with_understudy

CONTEXT = 192
VOCAB = 199
PROMPT = [1, 17, 44, 101, 9]
#: (past, tokens, wanted): a prompt over two blocks, a token, a judged draft, an overwritten text, and to the very end
STEPS = [(0, 70, 1), (70, 1, 1), (70, 9, 9), (64, 1, 1), (60, 3, 2), (63, 2, 2), (0, 5, 5), (5, 123, 1), (128, 64, 64)]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=7), Sampling(temperature=1.2, seed=8)]


def understudy_bundle(work: Path) -> Bundle:
    """In a folder of `work`."""
    folder = tiny_bundle(work / "bundle", max_context=CONTEXT)
    return open_bundle(with_understudy(source_of(work / "source", VOCAB), folder))


def steps(vocab: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"past": past, "tokens": rng.integers(4, vocab, count).tolist(), "wanted": wanted}
        for past, count, wanted in STEPS
    ]


def pythons_logits(bundle: Bundle, asked: list[dict[str, Any]]) -> np.ndarray:
    """The last tokens of a step as a tree's nodes, so that their logits are given too."""
    assert bundle.manifest.understudy
    model = open_target_bundle(bundle.folder / bundle.manifest.understudy.folder)
    runner = OnnxRunner.of(model, bundle.manifest.max_context, threads=1)
    rows = []
    for step in asked:
        chain = len(step["tokens"]) - step["wanted"] + 1
        tree = TokenTree.chain(tuple(step["tokens"][chain:]))
        rows.append(runner.forward([Part(0, step["past"], tuple(step["tokens"][:chain]), tree)]))
    return np.concatenate(rows)


def made(bundle: Bundle) -> Understudy:
    entry = bundle.manifest.understudy
    assert entry
    folder = bundle.folder / entry.folder
    return Understudy(folder, entry.manifest_sha256, CONTEXT, VOCAB, lambda ids: "", threads=1)


def written(bundle: Bundle, text: list[int], begin: int, count: int, sampling: Sampling) -> tuple[list[int], Any]:
    """What Python's writes behind `text`, and the probabilities."""
    understudy, all_of_it, probabilities = made(bundle), list(text), []
    for _ in range(count):
        token, probability = understudy.next_token(all_of_it, Decoding(begin, sampling))
        all_of_it.append(token)
        probabilities.append(probability)
    return all_of_it[len(text) :], probabilities


def asking(text: list[int], begin: int, drafted: list[int], count: int, sampling: Sampling) -> dict[str, Any]:
    settings = msgspec.structs.asdict(sampling)
    return {"text": text, "begin": begin, "drafted": drafted, "count": count, "sampling": settings}


def drafts(bundle: Bundle) -> tuple[list[dict[str, Any]], list[tuple[int, list[int], list[float]]]]:
    """Texts with drafts behind them, and of each: how much is its own, what it writes, with which probabilities."""
    answers, wanted, begin = [], [], len(PROMPT)
    for sampling in SAMPLINGS:
        tokens, probabilities = written(bundle, PROMPT, begin, 150, sampling)
        for right in (0, 3, 70):
            drafted = [*tokens[:right], (tokens[right] + 1) % VOCAB, 5]
            answers.append(asking(PROMPT, begin, drafted, 150 - right, sampling))
            wanted.append((right, tokens, probabilities[right:]))
    return answers, wanted


def a_loop(bundle: Bundle) -> tuple[list[int], list[int], list[int]]:
    """A text that the model would go on with a repetition of 14 tokens; what it writes behind it, looping or not."""
    rng, understudy = np.random.default_rng(1), made(bundle)
    while True:
        phrase, after = rng.integers(4, VOCAB, 14).tolist(), int(rng.integers(4, VOCAB))
        text = [*PROMPT, *phrase, after, *phrase]
        if understudy.next_token(text, Decoding(len(text)))[0] == after:
            break
    tokens, _ = written(bundle, text, len(PROMPT), 20, Sampling())
    looped, _ = written(bundle, text, len(text), 20, Sampling())
    assert tokens[0] != after == looped[0]
    return text, tokens, looped
