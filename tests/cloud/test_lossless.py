"""Ragged batched tree verification equals plain decoding, token for token, in float64."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from cloud.engine.segment import Segment
from cloud.engine.sessions import SessionRecord
from cloud.torch_engine.attention import span_mask
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import FINISH_EOS, FINISH_LENGTH, Generate, Open, Verdict, pack_ids
from tests.cloud.drive import (
    VLLM,
    Direct,
    Kind,
    assert_rows,
    expected_path,
    made_for,
    make_verifier,
    random_tree,
    started,
)
from tests.device import EXACT
from tests.tiers import quick
from tests.tiny import VARIANTS, plain_decode, tiny_model
from tests.waiting import HANG

pytestmark = pytest.mark.gpu
#: attention session by session, and in one call over the whole pool
each_way = pytest.mark.parametrize("engine", ["torch", VLLM])

VOCAB = 199
#: the oracle runs this far ahead: more than a tree is deep
SPARE = 10
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.0, seed=2**62 + 5),
    Sampling(temperature=1.0, top_p=0.9, seed=3),
    Sampling(temperature=1.3, top_k=20, seed=4),
    Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=5),
]
MODELS = {
    "llama": {"layers": 2},
    "qwen2": {"layers": 3, "tied": True},
    "qwen3": {"layers": 2, "kv_heads": 1},
    "mistral": {"layers": 2, "kv_heads": 4, "hidden": 48},
    **{family: {"layers": 2} for family in VARIANTS},
}
#: in these attention itself is another; of the rest the engine's part is tried in `make test-slow`
QUICK = {"llama", "mistral-local", "gemma3_text"}
#: those that vLLM does not serve, and those of which it changes transformers' class, by which rows are checked
REFUSED, CHANGED = {"qwen2-windows", "qwen3-windows", "ministral3"}, {"smollm3", "olmo2"}


@dataclass
class Conversation:
    """What a device knows, and the oracle."""

    prompt: list[int]
    sampling: Sampling
    truth: list[int]
    id: bytes = field(default_factory=lambda: os.urandom(16))
    tokens: list[int] = field(default_factory=list)
    seq: int = 0
    accepted: int = 0

    @property
    def rest(self) -> list[int]:
        return self.truth[len(self.tokens) - len(self.prompt) :]


def conversations(model: Any, rng: random.Random, count: int, new: int) -> list[Conversation]:
    made = []
    for index in range(count):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.choice([1, 2, 9, 40, 70]))]
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        truth = plain_decode(model, prompt, sampling, new, eos_ids=())
        made.append(Conversation(prompt, sampling, truth, tokens=list(prompt)))
    return made


@each_way
@pytest.mark.parametrize("family", quick(QUICK, MODELS))
def test_many_sessions_with_evictions_and_replicas(family: str, engine: Kind) -> None:
    if engine == "vllm" and family in REFUSED:
        pytest.skip("vLLM refuses it: test_vllm")
    model = tiny_model(family, seed=7, vocab=VOCAB, **{**MODELS[family], **made_for(engine)})
    rng = random.Random(family)
    talks = conversations(model, rng, 6, 26 + SPARE)
    # two extents for six sessions, so every round evicts
    replicas = [make_verifier(model, (), engine=engine, kv_tokens=256) for _ in range(2)]
    resumed = evicted = 0
    with started(replicas[0]) as one, started(replicas[1]) as two:
        home: dict[bytes, Direct] = {}
        for talk in talks:
            home[talk.id] = one
            one.open(talk.id, talk.tokens, 0, talk.sampling)
        while any(len(talk.rest) > SPARE for talk in talks):
            waiting = []
            for talk in talks:
                if len(talk.rest) <= SPARE:
                    continue
                if rng.random() < 0.15:
                    home[talk.id] = rng.choice([one, two])
                    back = rng.randrange(min(4, len(talk.tokens) - len(talk.prompt) + 1))
                    talk.tokens = talk.tokens[: len(talk.tokens) - back]
                    home[talk.id].open(talk.id, talk.tokens, talk.seq, talk.sampling)
                    resumed += 1
                evicted += home[talk.id].verifier.engine.pool.used(talk.id) == 0
                talk.seq += 1
                tree = random_tree(rng, talk.rest, VOCAB)
                waiting.append((talk, tree, home[talk.id].verify(talk.id, talk.seq, len(talk.tokens), tree)))
            for talk, tree, replies in waiting:
                verdict = replies.get(timeout=HANG)
                assert isinstance(verdict, Verdict), verdict
                path = list(verdict.accepted)
                assert path == expected_path(tree, talk.rest)
                emitted = [tree.tokens[node] for node in path] + [verdict.bonus]
                assert emitted == talk.rest[: len(emitted)]
                assert verdict.base_len == len(talk.tokens) and verdict.seq == talk.seq
                if engine != "vllm" or family not in CHANGED:
                    assert_rows(
                        model, home[talk.id].verifier, talk.tokens + emitted, len(talk.tokens) - 1, verdict.rows
                    )
                talk.tokens += emitted
                talk.accepted += len(path)
    assert resumed > 3 and evicted > 10
    assert sum(talk.accepted for talk in talks) > 20


#: rotary embeddings that scale, with an original context between the session's length and its neighbours'
LONG = {"factor": 4.0, "original_max_position_embeddings": 45}
ROPES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", **LONG},
    {"rope_type": "yarn", **LONG},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
]


@each_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: (rope or {}).get("rope_type", "default"))
def test_a_session_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, rope: dict[str, Any] | None, engine: Kind
) -> None:
    """Logits, keys and values of one tree, alone and among others with chains and trees of their own."""
    if engine == "vllm" and dtype == torch.float64:
        pytest.skip("vLLM has no float64")
    model = tiny_model("llama", seed=3, vocab=VOCAB, rope=rope, **{**made_for(engine), "dtype": dtype})
    rng = random.Random(1)
    prompt = [rng.randrange(4, VOCAB) for _ in range(30)]
    tree = random_tree(random.Random(5), [10, 11, 12, 13, 14, 15], VOCAB)
    assert len(tree) > 3 and max(tree.depths) > 1

    def run(others: int) -> torch.Tensor:
        verifier = make_verifier(model, (), engine=engine, kv_tokens=4096)
        stepper, store = verifier.engine, verifier.sessions
        keep: set[bytes] = set()
        segments = []
        for index in range(others + 1):
            tokens = prompt if index == others else [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 60))]
            name = bytes([index]) * 16
            session = store.open(name, Open(0, name, 0, pack_ids(tokens), 0, Sampling()), tokens, set())
            assert isinstance(session, SessionRecord)
            drafted = tree if index == others else random_tree(rng, [1, 2, 3, 4, 5], VOCAB)
            keep.add(name)
            assert stepper.pool.reserve(name, len(tokens) + len(drafted), keep)
            segments.append(Segment.of(session, stepper.pool, len(tokens), drafted))
        logits = stepper.forward(segments).values  # type: ignore[union-attr]
        assert logits.shape == (sum(1 + len(segment.tree) for segment in segments), VOCAB)
        return logits[-1 - len(tree) :].cpu()

    alone, together = run(0), run(5)
    assert alone.shape == (1 + len(tree), VOCAB)
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-10 if dtype == torch.float64 else 2e-4)
    # and both are what the unmodified model says on each path
    for node in range(-1, len(tree)):
        ids = prompt + [tree.tokens[n] for n in tree.path(node)]
        want = model(input_ids=torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(alone[node + 1], want, rtol=0, atol=EXACT if dtype == torch.float64 else 2e-4)


def test_mask_shows_past_chain_and_ancestors() -> None:
    tree = TokenTree((1, 2, 3, 4), (-1, 0, -1, 1))
    mask = span_mask(2, 3, tree, torch.float32)
    assert mask is not None
    want = [
        "11100 00",
        "11110 00",
        "11111 0000",
        "11111 1000",
        "11111 1100",
        "11111 0010",
        "11111 1101",
    ]
    rows = np.array([[int(c) for c in row.replace(" ", "").ljust(9, "0")] for row in want])
    assert (np.isfinite(mask.numpy()) == rows).all() and (mask.numpy()[rows == 1] == 0).all()
    assert span_mask(5, 1, TokenTree(), torch.float32) is None
    assert span_mask(0, 4, TokenTree(), torch.float32) is None
    wide = TokenTree.chain(range(255))
    assert (torch.isfinite(span_mask(0, 1, wide, torch.float64)).numpy() == np.tri(256)).all()  # type: ignore[arg-type]


@each_way
@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
def test_generate_equals_plain_decoding(sampling: Sampling, engine: Kind) -> None:
    model = tiny_model("qwen2", seed=11, vocab=VOCAB, **made_for(engine))
    prompt = [20, 21, 22]
    truth = plain_decode(model, prompt, sampling, 15, eos_ids=())
    with started(make_verifier(model, (), engine=engine)) as direct:
        session = os.urandom(16)
        direct.open(session, prompt, 0, sampling)
        _, replies = direct.submit(session, Generate(0, 1, 3, 10))
        got = [replies.get(timeout=HANG).bonus for _ in range(10)]  # type: ignore[union-attr]
        assert got == truth[:10]
        # a tree behind it, and the rows that GENERATE left out
        tree = TokenTree.chain(truth[10:12])
        verdict = direct.verify(session, 2, 13, tree).get(timeout=HANG)
        assert isinstance(verdict, Verdict)
        assert list(verdict.accepted) == [0, 1] and verdict.bonus == truth[12]
        tokens = prompt + truth[:13]
        opened, rows = direct.open(session, tokens, 2, sampling, have=1)
        assert opened.cached == len(tokens) - 1 and (rows.start, rows.stop) == (1, len(tokens) - 1)
        assert_rows(model, direct.verifier, tokens, 1, rows.block(1, rows.stop))


def test_generate_sends_rows_where_they_are_asked_for() -> None:
    model = tiny_model("llama", seed=5, vocab=VOCAB)
    prompt = [20, 21, 22]
    truth = plain_decode(model, prompt, Sampling(), 8, eos_ids=())
    with started(make_verifier(model, ())) as direct:
        session = os.urandom(16)
        direct.open(session, prompt, have=2)
        _, replies = direct.submit(session, Generate(0, 1, 3, 4))
        assert [replies.get(timeout=HANG).rows for _ in range(4)] == [b""] * 4  # type: ignore[union-attr]
        _, replies = direct.submit(session, Generate(0, 2, 7, 4, True))
        verdicts = [replies.get(timeout=HANG) for _ in range(4)]
        assert [verdict.rows for verdict in verdicts[:3]] == [b""] * 3  # type: ignore[union-attr]
        # the last one brings all that the device lacks, though none was computed meanwhile
        assert_rows(model, direct.verifier, prompt + truth, 2, verdicts[3].rows, 8)  # type: ignore[union-attr]


def test_rows_of_a_stream_come_together_and_none_is_left_out() -> None:
    model = tiny_model("llama", seed=5, vocab=VOCAB)
    prompt = [20, 21, 22]
    text = prompt + plain_decode(model, prompt, Sampling(), 24, eos_ids=())
    with started(make_verifier(model, ())) as direct:
        session = os.urandom(16)
        direct.open(session, prompt, have=2)
        _, replies = direct.submit(session, Generate(0, 1, 3, 12, True))
        verdicts = [replies.get(timeout=HANG) for _ in range(12)]
        sizes = [len(verdict.rows) // direct.verifier.features.shape.nbytes for verdict in verdicts]  # type: ignore[union-attr]
        assert sizes == [0] * 7 + [8] + [0] * 3 + [4]
        assert_rows(model, direct.verifier, text, 2, verdicts[7].rows, 8)  # type: ignore[union-attr]
        assert_rows(model, direct.verifier, text, 10, verdicts[11].rows, 4)  # type: ignore[union-attr]
        _, replies = direct.submit(session, Generate(0, 2, 15, 3))
        assert [replies.get(timeout=HANG).rows for _ in range(3)] == [b""] * 3  # type: ignore[union-attr]
        verdict = direct.verify(session, 3, 18, TokenTree.chain(text[18:20])).get(timeout=HANG)
        assert isinstance(verdict, Verdict) and len(verdict.accepted) == 2
        assert_rows(model, direct.verifier, text, 14, verdict.rows, 6)
        verdict = direct.verify(session, 4, 21, TokenTree()).get(timeout=HANG)
        assert isinstance(verdict, Verdict)
        assert_rows(model, direct.verifier, text, 20, verdict.rows, 1)


def test_end_of_answer_ends_the_walk() -> None:
    model = tiny_model("llama", seed=2, vocab=VOCAB)
    prompt = [9, 8, 7]
    truth = plain_decode(model, prompt, Sampling(), 12, eos_ids=())
    eos = truth[4]
    assert eos not in truth[:4]
    with started(make_verifier(model, (eos,))) as direct:
        session = os.urandom(16)
        direct.open(session, prompt)
        verdict = direct.verify(session, 1, 3, TokenTree.chain(truth[:8])).get(timeout=HANG)
        assert isinstance(verdict, Verdict)
        assert (list(verdict.accepted), verdict.bonus, verdict.finish) == ([0, 1, 2, 3], eos, FINISH_EOS)
        direct.open(session, prompt, 1)
        _, replies = direct.submit(session, Generate(0, 2, 3, 100))
        got = [replies.get(timeout=HANG) for _ in range(5)]
        assert [v.bonus for v in got] == truth[:5]  # type: ignore[union-attr]
        assert [v.finish for v in got] == [0, 0, 0, 0, FINISH_EOS]  # type: ignore[union-attr]


def test_full_context_ends_the_walk() -> None:
    model = tiny_model("llama", seed=2, vocab=VOCAB)
    prompt = [9, 8, 7]
    truth = plain_decode(model, prompt, Sampling(), 12, eos_ids=(), max_context=10)
    assert len(truth) == 7
    with started(make_verifier(model, (), max_model_len=10)) as direct:
        session = os.urandom(16)
        direct.open(session, prompt)
        verdict = direct.verify(session, 1, 3, TokenTree.chain(truth)).get(timeout=HANG)
        assert isinstance(verdict, Verdict)
        assert (list(verdict.accepted), verdict.bonus, verdict.finish) == ([*range(6)], truth[6], FINISH_LENGTH)


@each_way
def test_compaction_leaves_what_a_plain_prefill_would_have_written(engine: Kind) -> None:
    model = tiny_model("mistral", seed=5, vocab=VOCAB, **made_for(engine))
    prompt = [4, 5, 6, 7, 8]
    truth = plain_decode(model, prompt, Sampling(), 6, eos_ids=())
    # the accepted path is nodes 1, 3, 6: none where a plain prefill would have put it
    tree = TokenTree((9, truth[0], 10, truth[1], 11, 12, truth[2]), (-1, -1, 0, 1, 1, 3, 3))
    with started(make_verifier(model, (), engine=engine, kv_tokens=1024)) as direct:
        drafted, plain = os.urandom(16), os.urandom(16)
        direct.open(drafted, prompt)
        verdict = direct.verify(drafted, 1, 5, tree).get(timeout=HANG)
        assert isinstance(verdict, Verdict) and list(verdict.accepted) == [1, 3, 6]
        direct.open(plain, prompt + truth[:4])
        pool, runner = direct.verifier.engine.pool, direct.verifier.engine.runner
        a, b = pool.extent(drafted), pool.extent(plain)
        assert a.used == b.used == 8
        ours, theirs = (runner.gather((0, 1), range(each.base, each.base + 8)) for each in (a, b))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 if engine == "vllm" else 1e-10)


@each_way
def test_rows_across_prefill_chunks(engine: Kind) -> None:
    """70 tokens in chunks of 16; other sessions share the steps."""
    model = tiny_model("qwen3", seed=6, vocab=VOCAB, **made_for(engine))
    rng = random.Random(0)
    texts = [[rng.randrange(4, VOCAB) for _ in range(n)] for n in (70, 33, 17, 16, 2)]
    with started(make_verifier(model, (), engine=engine, kv_tokens=2048)) as direct:
        waiting = []
        for text in texts:
            session = os.urandom(16)
            request = Open(0, session, 0, pack_ids(text), 0, Sampling())
            waiting.append((text, direct.submit(session, request, tokens=text)[1]))
        for text, replies in waiting:
            replies.get(timeout=HANG)
            rows: Any = replies.get(timeout=HANG)
            assert (rows.start, rows.stop) == (0, len(text) - 1)
            assert_rows(model, direct.verifier, text, 0, rows.block(0, rows.stop))
