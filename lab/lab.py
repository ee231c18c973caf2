"""A target in this process and a drafter beside it, in which all comparisons of drafters run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloud.engine.acceptance import AcceptedPath
from cloud.engine.features import PackedRows
from cloud.engine.segment import Segment
from cloud.engine.sessions import SessionRecord
from cloud.server.service import Verifier
from cloud.torch_engine.drawing import TorchLogits
from cloud.torch_engine.runner import TorchRunner
from export.train.precision import Dtype, training_dtype
from lab.baselines.sampling import draft_distribution
from lab.contenders import Contender
from lab.multi_candidate import RuleEngine
from outrider_core.drafting.drafter import TreeShape
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import MAX_NODES, ROOT, TokenTree
from outrider_core.protocol.wire import Open, pack_ids

PREFILL = 512


def fast_dtype() -> Dtype:
    """Return the default number format of a target here: the one that this machine multiplies faster."""
    return training_dtype("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Answer:
    """An answer: its tokens and costs. Seconds without the prefill."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # drafts accepted, by round
    depths: list[int] = field(default_factory=list)  # levels drafted, by round
    #: per round: its tokens' -log p minus the entropy of p; 0 on average if nothing is lost
    surprise: list[float] = field(default_factory=list)
    nodes: int = 0
    steps: int = 0  # of the drafter's engine
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


class Lab:
    """A target that verifies in this process, without sockets or threads."""

    def __init__(self, verifier: Verifier) -> None:
        usual = verifier.engine
        self.verifier, self.eos = verifier, usual.eos_ids
        self.engine = RuleEngine(usual.runner, usual.pool, usual.producer, self.eos, verifier.max_context)
        assert verifier.tokenizer is not None  # None only in tests
        self.tokenizer = verifier.tokenizer
        self._hidden = torch.empty(0)
        self._count = 0
        assert isinstance(usual.runner, TorchRunner)
        self.device: torch.device = usual.runner.device
        usual.runner.model.model.norm.register_forward_hook(self._keep)

    def _keep(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        self._hidden = output[0]

    def encode(self, question: str) -> list[int]:
        return self.tokenizer.encode_chat([{"role": "user", "content": question}])

    def open(self, prompt: list[int], sampling: Sampling, contender: Contender | None) -> SessionRecord:
        self._count += 1
        session_id = self._count.to_bytes(16, "little")
        request = Open(0, session_id, 0, pack_ids(prompt), 0, sampling)
        session = self.verifier.sessions.open(session_id, request, list(prompt), set())
        assert session is not None
        if contender and contender.producer:
            self.engine.producer = contender.producer
            session.rows = PackedRows(contender.producer.shape)
        return session

    @torch.inference_mode()
    def answer(
        self,
        prompt: list[int],
        contender: Contender | None,
        sampling: Sampling,
        new: int,
        shape: TreeShape = TreeShape(),  # noqa: B008 - it is frozen
        weigh: bool = False,
    ) -> Answer:
        """Answer `prompt` (token ids) with one drafter, or without any. weigh: see `Answer.surprise`."""
        answer, session = Answer(), self.open(prompt, sampling, contender)
        drafter = contender.fresh() if contender else None
        rows = bool(contender and contender.producer)
        limit = len(prompt) + new
        self.prefill(session, contender, drafter, new + shape.nodes + 1)
        begun = time.perf_counter()
        while len(session.tokens) < limit and (
            len(session.tokens) == len(prompt) or session.tokens[-1] not in self.eos
        ):
            at = time.perf_counter()
            room = limit - len(session.tokens) - 1
            fitted = replace(shape, depth=max(1, min(shape.depth, room)))
            tree = drafter.draft(session.tokens, sampling, fitted).tree if drafter and room else TokenTree()
            self.engine.rule = getattr(drafter, "accept", None) if room else None
            drafted = time.perf_counter()
            base = len(session.tokens)
            [walked] = self.engine.step([Segment.of(session, self.engine.pool, 1, tree, rows)])
            verified = time.perf_counter()
            assert walked is not None
            self._teach(contender, drafter, session, base - 1, [0, *(1 + node for node in walked.accepted)])
            if not sampling.greedy and weigh:
                answer.surprise.append(self._surprise(tree, walked, sampling))
            answer.accepted.append(len(walked.accepted))
            answer.depths.append(max(tree.depths, default=0))
            answer.nodes += len(tree)
            answer.draft_seconds += drafted - at + time.perf_counter() - verified
            answer.verify_seconds += verified - drafted
        answer.seconds = time.perf_counter() - begun
        answer.steps = drafter.steps if drafter else 0
        answer.tokens = session.tokens[len(prompt) :]
        self.close(session)
        return answer

    @torch.inference_mode()
    def replay(self, prompt: list[int], truth: list[int], contender: Contender, shape: TreeShape) -> Answer:
        """Return what `answer` would have accepted on the way to `truth`, the target's own text: one forward in all."""
        text, answer = [*prompt, *truth], Answer(tokens=truth)
        session, drafter = self.open(text, Sampling(), contender), contender.fresh()
        hidden = self.prefill(session, contender, None)
        known, at = 0, len(prompt)
        while at < len(text):
            rows = session.rows.block(known, at - 1) if contender.producer else b""
            contender.learn(drafter, known, rows, hidden[known : at - 1])
            known, room = at - 1, len(text) - at - 1
            fitted = replace(shape, depth=max(1, min(shape.depth, room)))
            tree = drafter.draft(text[:at], Sampling(), fitted).tree if room else TokenTree()
            path: list[int] = []
            while text[at + len(path)] not in self.eos:
                child = tree.child(path[-1] if path else ROOT, text[at + len(path)])
                if child is None:
                    break
                path.append(child)
            answer.accepted.append(len(path))
            answer.depths.append(max(tree.depths, default=0))
            answer.nodes += len(tree)
            at += len(path) + 1
        answer.steps = drafter.steps
        self.close(session)
        return answer

    @torch.inference_mode()
    def prefill(
        self, session: SessionRecord, contender: Contender | None, drafter: Any, room: int = MAX_NODES + 1
    ) -> NDArray[np.float32]:
        """Run the text without its last token, keeping `room` for more; teach the drafter, if there is one.

        Returns the last hidden states [tokens run, hidden_size].
        """
        self.engine.rule = None
        text = session.tokens
        if not self.engine.pool.reserve(session.id, len(text) + room, set()):
            raise ValueError(f"{len(text)} tokens and {room} more do not fit into the verifier's pool")
        hidden, rows = [], bool(contender and contender.producer)
        for start in range(0, len(text) - 1, PREFILL):
            chain = min(PREFILL, len(text) - 1 - start)
            self.engine.step([Segment.of(session, self.engine.pool, chain, None, rows)])
            hidden.append(self._hidden[:chain].float().cpu().numpy())
            if drafter is not None:
                self._teach(contender, drafter, session, start, list(range(chain)))
        return np.concatenate(hidden) if hidden else np.zeros((0, 0), np.float32)

    def forward(self, session: SessionRecord, tree: TokenTree) -> torch.Tensor:
        """Return the target's logits [1 + nodes, vocab] after a prefilled text and after every node of `tree`."""
        logits = self.engine.forward([Segment.of(session, self.engine.pool, 1, tree)])
        assert isinstance(logits, TorchLogits)
        return logits.values

    def close(self, session: SessionRecord) -> None:
        self.verifier.sessions.forget(session.id)

    def _surprise(self, tree: TokenTree, walked: AcceptedPath, sampling: Sampling) -> float:
        """Sum -log p(token) - entropy(p) over a round's tokens, p the sampling distribution; nats."""
        rows = [0, *(1 + node for node in walked.accepted)]
        tokens = [*(tree.tokens[node] for node in walked.accepted), walked.bonus]
        distributions = draft_distribution(self.engine.logits[rows].float().cpu().numpy(), sampling)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(distributions)
            entropy = -np.where(distributions > 0, distributions * logs, 0.0).sum(-1)
        return float((-logs[np.arange(len(rows)), tokens] - entropy).sum())

    def _teach(
        self, contender: Contender | None, drafter: Any, session: SessionRecord, start: int, places: list[int]
    ) -> None:
        """Pass the last step's states of positions start.. to the drafter: they were at `places` of its row."""
        if contender is None:
            return
        hidden: NDArray[np.float32] = self._hidden[places].float().cpu().numpy()
        packed = session.rows.block(start, session.rows.stop) if contender.producer else b""
        contender.learn(drafter, start, packed, hidden)
