"""Faults of the engine: one bad request fails alone; a permanent fault is reported and ends the verifier."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import httpx
import pytest
import torch
from websockets.exceptions import InvalidStatus

from cloud.engine.request import EngineRequest, Reply
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_INTERNAL, ERR_UNKNOWN, Close, Error, Open, Opened, Verdict, pack_ids
from tests.cloud.drive import VLLM, Client, Kind, made_for, make_verifier, serve, started
from tests.tiny import plain_decode, tiny_model
from tests.waiting import HANG

POISON = 90
PROMPT = [5, 6, 7]


@pytest.mark.parametrize("engine", ["torch", VLLM])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=7)])
def test_a_session_whose_logits_are_not_numbers_fails_alone(sampling: Sampling, engine: Kind) -> None:
    model = tiny_model(**made_for(engine))
    truth = plain_decode(model, PROMPT, sampling, 12, eos_ids=())
    assert POISON not in truth
    model.model.embed_tokens.weight[POISON] = float("nan")
    verifier = make_verifier(model, (), engine=engine)
    with started(verifier) as direct:
        good, bad = os.urandom(16), os.urandom(16)
        direct.open(good, PROMPT, 0, sampling)
        tokens = list(PROMPT)
        for seq in range(1, 4):
            direct.open(bad, [POISON, 5, 6], 0, sampling)  # again each time: its extent may be another's next
            replies = [
                direct.verify(bad, 1, 3, TokenTree.chain([9])),
                direct.verify(good, seq, len(tokens), TokenTree.chain(truth[len(tokens) - 3 :][:2])),
            ]
            failed, verdict = (queue.get(timeout=HANG) for queue in replies)
            expect_not_numbers(failed)
            assert isinstance(verdict, Verdict)
            assert list(verdict.accepted) == [0, 1]
            tokens += [*truth[len(tokens) - 3 :][:2], verdict.bonus]
            assert tokens == PROMPT + truth[: len(tokens) - 3]
        text = verifier.metrics.text().decode()
    assert "outrider:unusable_logits_total 3.0" in text


def test_a_device_broken_for_good_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud.engine.batcher.MAX_STEP_FAILURES", 3)
    verifier = make_verifier(tiny_model(), ())
    with serve(verifier) as address:
        healths = [httpx.get(f"http://{address}/{path}") for path in ("healthz", "readyz")]
        assert [(health.status_code, health.text) for health in healths] == [(200, "alive\n"), (200, "ready\n")]
        verifier.engine.runner.forward = broken  # type: ignore[method-assign]
        with Client(address) as client:
            for _ in range(3):
                client.send(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling()))
                assert isinstance(client.any(), Opened)
                assert client.receive(Error).code == ERR_INTERNAL
        for path in ("healthz", "readyz"):
            health = httpx.get(f"http://{address}/{path}")
            assert (health.status_code, health.text) == (503, "broken: 3 steps in a row failed\n")
        with pytest.raises(InvalidStatus) as refused:
            Client(address)
        assert refused.value.response.status_code == 503


@pytest.mark.parametrize("fault", ["rows", "sender"])
def test_an_open_that_fails_half_way_leaves_nothing_behind(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is begun anew by the next OPEN, what waited for it is answered, and the engine goes on."""
    model = tiny_model()
    truth = plain_decode(model, PROMPT, Sampling(), 4, eos_ids=())
    session, verifier = os.urandom(16), make_verifier(model, ())
    with started(verifier) as direct:
        direct.open(session, PROMPT)
        first = direct.verify(session, 1, len(PROMPT), TokenTree.chain(truth[:1])).get(timeout=HANG)
        assert isinstance(first, Verdict)

        def fails(*_: object) -> None:
            raise RuntimeError("out of order")

        if fault == "rows":
            with monkeypatch.context() as patch:
                patch.setattr(verifier.engine.pool, "truncate", fails)
                reply = direct.submit(session, Open(0, session, 1, pack_ids(PROMPT), 3, Sampling()), tokens=PROMPT)[1]
                assert isinstance(failed := reply.get(timeout=HANG), Error) and failed.code == ERR_INTERNAL
        else:
            opening = Open(0, session, 1, pack_ids(PROMPT), 3, Sampling())
            verifier.submit(EngineRequest(session, opening, fails, tokens=PROMPT))
        unknown = direct.verify(session, 2, len(PROMPT), TokenTree()).get(timeout=HANG)
        assert isinstance(unknown, Error) and unknown.code == ERR_UNKNOWN
        direct.open(session, PROMPT)
        verdict = direct.verify(session, 1, len(PROMPT), TokenTree.chain(truth[:2])).get(timeout=HANG)
        assert isinstance(verdict, Verdict) and [*truth[:2], verdict.bonus] == truth[:3]
        assert verifier.alive


def broken(parts: object) -> torch.Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def expect_not_numbers(reply: Reply) -> None:
    assert isinstance(reply, Error), reply
    assert reply.code == ERR_INTERNAL and "not numbers" in reply.text


def test_a_lone_request_is_run_however_late_its_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for a second request ends, also if its time has passed before the thread begins to wait."""
    monkeypatch.setattr("cloud.engine.batcher.IDLE_WINDOW", 1e-9)
    monkeypatch.setattr("cloud.engine.batcher.time", SimpleNamespace(monotonic=lambda: 0.0))
    verifier, over = make_verifier(tiny_model(), ()), threading.Event()
    for _ in range(2):
        verifier.sessions.open(os.urandom(16), Open(0, bytes(16), 0, pack_ids(PROMPT), 0, Sampling()), PROMPT, set())

    def compete() -> None:
        while not over.is_set():
            sum(range(1000))

    def take() -> None:
        for _ in range(20_000):
            for _ in range(2):
                verifier.submit(EngineRequest(bytes(16), Close(0), lambda reply, done: None))
            assert verifier.batcher._take()

    others = [threading.Thread(target=compete) for _ in range(2)]
    taking = threading.Thread(target=take, daemon=True)
    for thread in (*others, taking):
        thread.start()
    taking.join(HANG)
    over.set()
    assert not taking.is_alive()
