"""Prefixes of one account's sessions run once; every text, key, value and row is that of a verifier without sharing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cloud.engine.features import PackedRows
from cloud.onnx_engine.loading import onnx_model
from cloud.server.service import Verifier
from cloud.settings import Settings
from outrider_core.protocol.rows import unpack_rows
from outrider_core.protocol.wire import Verdict
from tests.cloud.by_hand import ByHand
from tests.cloud.drive import VLLM, in_chunks, made_for, make_verifier, random_tree
from tests.targets.plain import lowered
from tests.tiny import tiny_drafter_config, tiny_model

VOCAB = 199
SYSTEM = [random.Random(0).randrange(4, VOCAB) for _ in range(1000)]
SHARED = {"max_model_len": 1100, "max_nodes": 24, "kv_tokens": 32768}


def torch_verifier(engine: Any) -> Callable[..., Verifier]:
    model = tiny_model("qwen3", seed=7, vocab=VOCAB, positions=2048, **made_for(engine))
    return lambda **values: make_verifier(model, (), engine=engine, **{"prefill_chunk": 256, **SHARED, **values})


@pytest.fixture(scope="module", params=["onnx", "torch", VLLM])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Verifier]:
    """Makes verifiers of one model, all on the same engine."""
    if request.param != "onnx":
        return torch_verifier(request.param)
    model = tiny_model("qwen3", seed=7, hidden=64, vocab=VOCAB, dtype=torch.float32, positions=2048)
    bundle = lowered(model, tmp_path_factory.mktemp("target"), max_context=2048)
    config, tensors = tiny_drafter_config(model)
    arrays = {name: tensor.float().numpy() for name, tensor in tensors.items()}

    def onnx_verifier(prefill_chunk: int = 256, **values: Any) -> Verifier:
        settings = Settings(**{**SHARED, "threads": 1, **values})
        return in_chunks(Verifier(onnx_model(bundle, (config, arrays, "tiny"), settings), settings), prefill_chunk)

    return onnx_verifier


def bits(verifier: Verifier, rows: Sequence[int]) -> Any:
    """Keys and values of pool rows in all layers."""
    return np.asarray(verifier.engine.runner.gather((0, 1), rows))


def assert_same(verifier: Verifier, ours: Any, theirs: Any) -> None:
    """Bit by bit where the engine is exact."""
    if verifier.arithmetic.startswith("onnx"):
        np.testing.assert_array_equal(ours, theirs)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 if verifier.arithmetic.startswith("vllm") else 1e-10)


def test_twenty_sessions_prefill_one_system_prompt_once(make: Callable[..., Verifier]) -> None:
    """All at the same moment. The last one's text, rows, keys and values are those of a session that is alone."""
    on, off = ByHand(make(prefix_cache="on")), ByHand(make())
    texts = [[*SYSTEM, *(10 + index, 20, 30)] for index in range(20)]
    ids = [bytes([index]) * 16 for index in range(20)]
    opened = [on.open(name, text) for name, text in zip(ids, texts, strict=True)]
    on.finish()
    own = 20 * 2  # of each its own tokens but the root
    assert on.ran == len(SYSTEM) + own
    assert on.metric("prefix_cache_hits") == 19 * len(SYSTEM) and on.metric("prefix_reuses") == 19
    assert on.metric("prompt_tokens") == on.ran and on.metric("num_preemptions") == 0
    tree, said = random_tree(random.Random(1), [5, 6, 7], VOCAB), []
    alone = off.open(ids[19], texts[19])
    for hand in (on, off):
        verified = hand.verify(ids[19], 1, len(texts[19]), tree)
        hand.finish()
        verdict = verified.replies[0]
        assert isinstance(verdict, Verdict)
        written = hand.generate(ids[19], 2, len(texts[19]) + len(verdict.accepted) + 1, 12)
        hand.finish()
        said.append([*verdict.accepted, verdict.bonus, *written.drawn])
    assert said[0] == said[1] and len(said[0]) >= 13
    told = [asked.replies[-1] for asked in (opened[19], alone)]
    assert all(isinstance(rows, PackedRows) and rows.stop == len(texts[19]) - 1 for rows in told)
    shape = on.verifier.features.shape
    ours, theirs = (unpack_rows(rows.block(0, rows.stop), shape) for rows in told)  # type: ignore[union-attr]
    assert (np.abs(ours - theirs) <= np.abs(theirs).max(-1, keepdims=True) / 127 + 1e-6).all()  # a packed step
    assert_same(on.verifier, bits(on.verifier, on.kept(ids[19])), bits(off.verifier, off.kept(ids[19])))


def test_nothing_crosses_accounts(make: Callable[..., Verifier]) -> None:
    hand = ByHand(make(prefix_cache="on"))
    text = [*SYSTEM[:300], 5]
    for index, account in enumerate(("one", "two")):
        before = hand.ran
        hand.open(bytes([index]) * 16, text, account)
        hand.finish()
        assert hand.ran - before == 300
    hand.close(bytes([0]) * 16)  # what it leaves is its account's too
    hand.open(bytes([2]) * 16, [*text, 6], "three")
    hand.finish()
    assert hand.ran == 901 and hand.metric("prefix_cache_hits") == 0
    hand.open(bytes([3]) * 16, [*text, 6], "one")
    hand.finish()
    assert hand.ran == 901 + 1 and hand.metric("prefix_cache_hits") == 300


def test_one_that_gives_up_in_the_middle_leaves_what_it_ran(make: Callable[..., Verifier]) -> None:
    """By CANCEL, a lost connection or CLOSE: the next one goes on from there, and ends as one that was alone."""
    on, off = ByHand(make(prefix_cache="on", prefill_chunk=64)), ByHand(make())
    texts = [[*SYSTEM[:400], index] for index in (5, 6, 7)]
    ids = [bytes([index]) * 16 for index in range(3)]
    requests = [on.open(name, text).request for name, text in zip(ids, texts, strict=True)]
    on.step()
    on.step()
    assert on.ran == 128
    requests[0].cancelled = True
    on.step()
    assert on.ran == 192
    on.close(ids[1])
    requests[1].cancelled = True
    written = on.generate(ids[2], 1, len(texts[2]), 9)
    on.finish()
    assert on.ran == 400 + 9  # of the last GENERATE each token
    off.open(ids[2], texts[2])
    truth = off.generate(ids[2], 1, len(texts[2]), 9)
    off.finish()
    assert written.drawn == truth.drawn and len(truth.drawn) == 9
    assert_same(on.verifier, bits(on.verifier, on.kept(ids[2])), bits(off.verifier, off.kept(ids[2])))


def test_a_conversation_goes_on_from_what_its_last_answer_left(make: Callable[..., Verifier]) -> None:
    """Also in a pool that cannot hold it twice. A new conversation with its beginning leaves the rest to it."""
    for rows in (624, 4096):
        hand = ByHand(make(prefix_cache="on", max_model_len=600, kv_tokens=rows))
        text = SYSTEM[:300]
        hand.open(b"1" * 16, text)
        said = hand.generate(b"1" * 16, 1, 300, 40)
        hand.finish()
        hand.close(b"1" * 16)
        hand.step()
        assert len(hand.verifier.sessions) == 0 and hand.verifier.engine.pool.rows_used == 0
        longer = [*text, *said.drawn, 5, 6, 7]
        before = hand.ran
        hand.open(b"2" * 16, longer)
        hand.finish()
        assert hand.ran - before == len(longer) - 1 - 339  # the last token that was written has not run
        hand.close(b"2" * 16)
        before = hand.ran
        hand.open(b"3" * 16, [*text[:200], 8, 9])
        hand.finish()
        assert hand.ran - before == 1 and hand.metric("num_preemptions") == 0
        held = len(hand.verifier.engine.pool.owners())
        assert held == (1 if rows == 624 else 2)


def test_what_was_left_goes_first() -> None:
    """Before sessions of any account, of the one that holds most first."""
    hand = ByHand(torch_verifier("torch")(prefix_cache="on", max_model_len=200, kv_tokens=1024))
    small = [*SYSTEM[:100], 5]
    hand.open(b"s" * 16, small, "small")
    hand.finish()
    hand.close(b"s" * 16)
    for index in range(12):
        name = bytes([index]) * 16
        hand.open(name, [index + 10] * 150, "large")
        hand.finish()
        if index != 3:
            hand.close(name)
    assert hand.verifier.engine.pool.used(bytes([3]) * 16) == 149 and hand.metric("num_preemptions") == 0
    before = hand.ran
    hand.open(b"t" * 16, small, "small")
    hand.finish()
    assert hand.ran == before


def test_what_was_left_is_forgotten_in_time() -> None:
    hand = ByHand(torch_verifier("torch")(prefix_cache="on"))
    store, now = hand.verifier.sessions, [0.0]
    store._clock = lambda: now[0]
    hand.open(b"s" * 16, [*SYSTEM[:200], 5])
    hand.finish()
    hand.close(b"s" * 16)
    now[0] = 3000.0
    hand.open(b"t" * 16, [*SYSTEM[:90], 6])  # uses a part of it
    hand.finish()
    now[0] = 6000.0
    hand.step()
    assert len(hand.verifier.engine.pool.owners()) == 2
    now[0] = 6601.0
    hand.step()
    assert hand.verifier.engine.pool.owners() == [] and list(store.of_account("")) == []


def test_it_is_off_where_no_token_tells_accounts_apart() -> None:
    make = torch_verifier("torch")
    for value in ("auto", "off"):
        hand = ByHand(make(prefix_cache=value))
        for index in range(2):
            hand.open(bytes([index]) * 16, [*SYSTEM[:100], 5])
            hand.finish()
            hand.close(bytes([index]) * 16)
        assert hand.ran == 200 and hand.verifier.engine.pool.owners() == []
