"""The default target in 8 bits: 100 answers through random trees, beside others, with evictions and reconnects.

Every row of logits that a verifier draws from has the bits that plain decoding has behind the same text.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cloud.engine.drawing import HostLogits
from cloud.engine.runner import ModelRunner
from cloud.engine.served_model import ServedModel
from cloud.onnx_engine.loading import load_model
from cloud.server.service import Verifier
from cloud.settings import Settings
from outrider_core.chat.tokenizer import open_chat_tokenizer
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.sampling import Sampling, draw
from outrider_core.protocol.tree import ROOT
from outrider_core.protocol.wire import Verdict
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.cached import cached_target
from outrider_core.targets.part import Part
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import Direct, in_chunks, random_tree, started
from tests.e2e.conftest import DRAFTER, needs_default_bundle
from tests.waiting import HANG

ANSWERS, AT_ONCE, TOKENS = 100, 10, 40
ASKED = [
    "Explain {} to a child.", "Write three sentences about {}.", "List facts about {}.", "What is {} good for?",
    "Compare {} with the opposite.", "Write a poem about {}.", "Translate into French: I like {}.",
    "Write JSON with two fields about {}.", "Write a Python function about {}.", "Summarize what is known of {}.",
]  # fmt: skip
TOPICS = ["rain", "steam engines", "chess", "bread", "the moon", "prime numbers", "bees", "paper", "salt", "trust"]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.0, top_p=0.9, seed=4)]
Text = tuple[int, ...]


class Ledger:
    """A runner that keeps a digest of the logits behind every text that it was asked about."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._tokens: dict[int, int] = {}  # by pool row
        self.digests: dict[Text, bytes] = {}
        self.rows = self.again = self.joined = 0  # joined: steps of several sessions

    def forward(self, parts: Sequence[Part]) -> HostLogits:
        logits = self._runner.forward(parts)
        assert isinstance(logits, HostLogits)
        self.joined += len(parts) > 1
        found = iter(logits.values)
        for part in parts:
            first = part.base + part.past
            self._tokens.update(enumerate((*part.chain, *part.tree.tokens), first))
            text = tuple(self._tokens[row] for row in range(part.base, first + len(part.chain)))
            paths: dict[int, Text] = {ROOT: ()}
            for node, (token, parent) in enumerate(zip(part.tree.tokens, part.tree.parents, strict=True)):
                paths[node] = (*paths[parent], token)
            for node in [ROOT, *range(len(part.tree))] if part.wanted else []:
                self._keep(text + paths[node], next(found))
        assert next(found, None) is None
        return logits

    def _keep(self, text: Text, row: np.ndarray) -> None:
        digest = hashlib.sha256(row.tobytes()).digest()
        self.again += text in self.digests
        assert self.digests.setdefault(text, digest) == digest, "the same text again, and other logits"
        self.rows += 1

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._runner.move(sources, targets)
        self._tokens.update(zip(targets, [self._tokens[row] for row in sources], strict=True))

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)


def plain(bundle: TargetBundle, runner: OnnxRunner, prompt: Text, sampling: Sampling) -> tuple[Text, list[bytes]]:
    """The answer of plain decoding, and a digest of the logits behind each of its prefixes."""
    text, digests, chain = prompt, list[bytes](), prompt
    while len(text) < len(prompt) + TOKENS and text[-1] not in bundle.eos_ids:
        row = runner.forward([Part(0, len(text) - len(chain), chain)])[0]
        digests.append(hashlib.sha256(row.tobytes()).digest())
        text = (*text, draw(row, sampling, len(text)))
        chain = text[-1:]
    return text, digests


@needs_default_bundle
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_row_of_logits_is_that_of_plain_decoding() -> None:
    bundle = cached_target(TargetSource.resolve("smollm2-135m-instruct"))
    chat, alone = open_chat_tokenizer(bundle.folder), OnnxRunner.of(bundle, 512)
    asked = [question.format(topic) for question in ASKED for topic in TOPICS]
    prompts = [tuple(chat.encode_chat([{"role": "user", "content": text}])) for text in asked[:ANSWERS]]
    samplings = [SAMPLINGS[index % 3] for index in range(ANSWERS)]
    truths = [plain(bundle, alone, *each) for each in zip(prompts, samplings, strict=True)]

    # a pool for half of the sessions, and prompts in pieces
    settings = Settings(drafter=DRAFTER, max_model_len=256, max_nodes=24, tree_budget=24, kv_tokens=AT_ONCE * 64)
    model = load_model(settings, TargetSource.resolve(settings.model))
    ledger = Ledger(model.runner)
    verifier = in_chunks(Verifier(ServedModel(**{**vars(model), "runner": ledger}), settings), 29)
    rng = random.Random(0)
    with started(verifier) as direct:
        for start in range(0, ANSWERS, AT_ONCE):
            ours = range(start, start + AT_ONCE)
            texts = answer(direct, rng, [prompts[i] for i in ours], [samplings[i] for i in ours], truths[start:])
            for text, index in zip(texts, ours, strict=True):
                assert text[: len(truths[index][0])] == truths[index][0]
        assert verifier.engine.pool.evictions > ANSWERS
    for prompt, (text, digests) in zip(prompts, truths, strict=True):
        for length, digest in enumerate(digests, len(prompt)):
            assert ledger.digests[text[:length]] == digest, "other logits than plain decoding's"
    compared = sum(len(digests) for _, digests in truths)
    assert ledger.again > ANSWERS // 2 and ledger.joined > ANSWERS
    print(f"{ANSWERS} answers; rows of logits: {ledger.rows}, {ledger.again} again, {compared} of plain decoding's")


def answer(
    direct: Direct,
    rng: random.Random,
    prompts: Sequence[Text],
    samplings: Sequence[Sampling],
    truths: Sequence[tuple[Text, list[bytes]]],
    rules: Callable[[int], Rules | None] = lambda index: None,
) -> list[Text]:
    """Sessions that are asked in turns, by random trees, until each has written its truth; some are opened anew."""
    ids, texts = [os.urandom(16) for _ in prompts], list(prompts)
    seqs = [0] * len(prompts)  # 0: not opened yet
    while waiting := [i for i, text in enumerate(texts) if len(text) < len(truths[i][0])]:
        asked = []
        for index in waiting:
            if not seqs[index] or rng.random() < 0.05:  # a new link, to a verifier that may never have heard of it
                ids[index] = os.urandom(16) if rng.random() < 0.5 else ids[index]
                seqs[index] += 1
                known = max(len(prompts[index]), len(texts[index]) - rng.randrange(8))  # what came last was lost
                texts[index] = texts[index][:known]
                direct.open(ids[index], texts[index], seqs[index], samplings[index], rules=rules(index))
        for index in waiting:
            tree = random_tree(rng, truths[index][0][len(texts[index]) :], direct.verifier.vocab_size)
            seqs[index] += 1
            asked.append((index, tree, direct.verify(ids[index], seqs[index], len(texts[index]), tree)))
        for index, tree, replies in asked:
            verdict = replies.get(timeout=HANG)
            assert isinstance(verdict, Verdict), verdict
            texts[index] += (*(tree.tokens[node] for node in verdict.accepted), verdict.bonus)
    return texts
