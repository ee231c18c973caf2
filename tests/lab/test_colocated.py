"""The drafter on the server: the same text as without, in fewer steps; through the wire and over HTTP."""

from __future__ import annotations

import os
import queue
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from cloud.engine.request import Reply
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import torch_model
from export.bundle.verifier_process import VerifierProcess
from lab.colocated import ColocatedScheduler
from lab.contenders import MoAContender
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.models.layers import tables_of
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Generate, Verdict
from tests.cloud.drive import DRAFTER_HASH, in_chunks, serve, started
from tests.tiny import (
    plain_decode,
    save_tiny_drafter,
    save_tiny_target,
    tiny_drafter_config,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)
from tests.waiting import HANG

VOCAB = 48  # few tokens, so that even a random drafter is right at times
DRAFT_IDS = torch.arange(VOCAB)
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 20, "temperature": 0}


def colocated(model: Any, folder: Path | None, **settings: int) -> Verifier:
    """A verifier that drafts by itself, its drafter in `folder`; None: the same without that."""
    values = {"max_model_len": 128, "max_nodes": 24, "kv_tokens": 1024, **settings}
    chosen, target = Settings(**values), tiny_target(model, ())  # type: ignore[arg-type]
    served = torch_model(target, (*tiny_drafter_config(model, draft_ids=DRAFT_IDS), DRAFTER_HASH), chosen)
    if folder is not None:
        save_tiny_drafter(folder, model, target.model_hash, DRAFT_IDS)
        drafter = MoAContender("colocated", folder, tables_of(model), lookup=True, row_cost=None)
        served = replace(served, scheduler=partial(ColocatedScheduler, drafter.fresh))
    return in_chunks(Verifier(served, chosen), 16)


def generated(replies: queue.Queue[Reply], count: int) -> list[Verdict]:
    verdicts = []
    for _ in range(count):
        reply = replies.get(timeout=HANG)
        assert isinstance(reply, Verdict), reply
        verdicts.append(reply)
    return verdicts


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=4)])
@pytest.mark.parametrize("new", [1, 2, 40])
def test_same_text_token_by_token(sampling: Sampling, new: int, tmp_path: Path) -> None:
    model = tiny_model("llama", seed=13, vocab=VOCAB)
    prompt = [20, 21, 22, 20, 21]
    truth = plain_decode(model, prompt, sampling, 45, eos_ids=())
    with started(colocated(model, tmp_path)) as direct:
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


def test_another_text_under_the_same_session(tmp_path: Path) -> None:
    """An OPEN that takes tokens back and goes on differently: no stale row or cache is drafted with or decoded from."""
    model = tiny_model("qwen3", seed=3, vocab=VOCAB)
    with started(colocated(model, tmp_path)) as direct:
        session = os.urandom(16)
        for seq, prompt in enumerate(([5, 6, 7, 8], [5, 6, 9, 9, 9], [5, 6]), 1):
            direct.open(session, prompt, seq - 1)
            _, replies = direct.submit(session, Generate(0, seq, len(prompt), 12))
            assert [v.bonus for v in generated(replies, 12)] == plain_decode(model, prompt, Sampling(), 12, eos_ids=())


def test_chat_completions_are_drafted_too(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=13, vocab=VOCAB)
    texts = []
    for verifier in (colocated(model, tmp_path), colocated(model, None)):
        verifier.tokenizer, verifier.model_name = chat_tokenizer_of(tiny_tokenizer(VOCAB)), "tiny"
        with serve(verifier) as address:
            answer = httpx.post(f"http://{address}/v1/chat/completions", json=ASK).json()
            drafted = answer["usage"].pop("outrider")["drafted_tokens"]
            assert (drafted > 0) == (not texts), "the first of them drafts"
            texts.append((answer["choices"][0]["message"]["content"], answer["usage"]))
    assert texts[0] == texts[1] and len(texts[0][0]) > 20


def test_the_command_serves_what_it_drafts(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=13, vocab=VOCAB, dtype=torch.float32)
    save_tiny_drafter(tmp_path / "drafter", model, save_tiny_target(tmp_path / "target", model), DRAFT_IDS)
    flags = (
        "--model",
        str(tmp_path / "target"),
        "--dtype",
        "float32",
        "--served-model-name",
        "tiny",
        "--tree-budget",
        "16",
    )
    process = VerifierProcess(tmp_path / "drafter", tmp_path / "log", *flags, module="lab.colocated")
    process.start()
    try:
        process.wait_ready()
        answer = httpx.post(f"http://{process.address}/v1/chat/completions", json=ASK, timeout=30).json()
        assert answer["usage"]["outrider"]["drafted_tokens"] > 0
    finally:
        process.stop()
