"""The drafter on the server: the same text as without, in fewer steps; through the wire and over HTTP."""

from __future__ import annotations

import os
import queue
from typing import Any

import httpx
import pytest
import torch

from cloud.engine.jobs import Reply
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import torch_model
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.models.moa import device_half
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Generate, Verdict
from tests.cloud.drive import DRAFTER_HASH, serve, started
from tests.tiny import plain_decode, tiny_drafter_config, tiny_model, tiny_target, tiny_tokenizer
from tests.waiting import HANG

VOCAB = 48  # few tokens, so that even a random drafter is right at times
DRAFT_IDS = torch.arange(VOCAB)


def colocated(model: Any, drafting: bool = True, **settings: int) -> Verifier:
    """A verifier that drafts by itself, or the same without that."""
    values = {"max_context": 128, "max_nodes": 24, "kv_tokens": 1024, "prefill_chunk": 16, **settings}
    target, (config, tensors) = tiny_target(model, ()), tiny_drafter_config(model, draft_ids=DRAFT_IDS)
    device = device_half(config, {k: v.float() for k, v in tensors.items()}, target.model)
    chosen = Settings(**values)  # type: ignore[arg-type]
    drafter = (config, tensors, DRAFTER_HASH)
    return Verifier(torch_model(target, drafter, chosen, device=device if drafting else None), chosen)


def generated(replies: queue.Queue[Reply], count: int) -> list[Verdict]:
    verdicts = []
    for _ in range(count):
        reply = replies.get(timeout=HANG)
        assert isinstance(reply, Verdict), reply
        verdicts.append(reply)
    return verdicts


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=4)])
@pytest.mark.parametrize("new", [1, 2, 40])
def test_same_text_token_by_token(sampling: Sampling, new: int) -> None:
    model = tiny_model("llama", seed=13, vocab=VOCAB)
    prompt = [20, 21, 22, 20, 21]
    truth = plain_decode(model, prompt, sampling, 45, eos_ids=())
    with started(colocated(model)) as direct:
        session = os.urandom(16)
        direct.open(session, prompt, 0, sampling)
        _, replies = direct.submit(session, Generate(0, 1, len(prompt), new))
        verdicts = generated(replies, new)
        assert [verdict.bonus for verdict in verdicts] == truth[:new]
        assert [verdict.base_len for verdict in verdicts] == [len(prompt) + i for i in range(new)]
        assert all(verdict.accepted == b"" == verdict.rows for verdict in verdicts)
        # the session is where the last verdict says, and goes on from there
        tree = TokenTree.chain(truth[new : new + 2])
        verdict = direct.verify(session, 2, len(prompt) + new, tree).get(timeout=HANG)
        assert isinstance(verdict, Verdict)
        assert list(verdict.accepted) == [0, 1] and verdict.bonus == truth[new + 2]
        if new == 40:
            metrics = direct.verifier.metrics.registry
            drafts = metrics.get_sample_value("outrider:spec_decode_num_drafts_total")
            accepted = metrics.get_sample_value("outrider:spec_decode_num_accepted_tokens_total")
            assert drafts is not None and accepted is not None and accepted > 2 and drafts < new


def test_another_text_under_the_same_session() -> None:
    """An OPEN that takes tokens back and goes on differently: no stale row or cache is drafted with or decoded from."""
    model = tiny_model("qwen3", seed=3, vocab=VOCAB)
    with started(colocated(model)) as direct:
        session = os.urandom(16)
        for seq, prompt in enumerate(([5, 6, 7, 8], [5, 6, 9, 9, 9], [5, 6]), 1):
            direct.open(session, prompt, seq - 1)
            _, replies = direct.submit(session, Generate(0, seq, len(prompt), 12))
            assert [v.bonus for v in generated(replies, 12)] == plain_decode(model, prompt, Sampling(), 12, eos_ids=())


def test_chat_completions_are_drafted_too() -> None:
    model = tiny_model("llama", seed=13, vocab=VOCAB)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 20, "temperature": 0}
    texts = []
    for verifier in (colocated(model), colocated(model, drafting=False)):
        verifier.tokenizer, verifier.model_name = chat_tokenizer_of(tiny_tokenizer(VOCAB)), "tiny"
        with serve(verifier) as address:
            answer = httpx.post(f"http://{address}/v1/chat/completions", json=ask).json()
            drafted = answer["usage"].pop("outrider")["drafted_tokens"]
            assert (drafted > 0) == (not texts), "the first of them drafts"
            texts.append((answer["choices"][0]["message"]["content"], answer["usage"]))
    assert texts[0] == texts[1] and len(texts[0][0]) > 20
