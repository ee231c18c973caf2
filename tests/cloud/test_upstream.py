"""The verifier over another server: its protocol, against servers that answer as vLLM and SGLang document it.

They compute on the tiny target, so that texts can be compared with plain decoding's. A real vLLM is in
test_upstream_vllm.py; no real SGLang was tried.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch

from cloud.loading import load_verifier
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.upstream_engine.client import KEY_VARIABLE, UpstreamError, call, connect
from export.bundle.verifier_process import free_port
from outrider_core.protocol.constraint import Constraint, pack_bias
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_BOUNDS, ERR_INTERNAL, Error, Generate, Hello, Open, Verdict, pack_ids
from outrider_core.targets.source import TargetError
from tests.cloud.drive import Client, random_tree, serve, started
from tests.tiny import plain_decode, save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

MODEL = tiny_model(dtype=torch.float64)
VOCAB, BLOCK, PROMPT = 199, 4, [5, 6, 7]
#: rows of a prompt that was cached: whatever the memory held
GARBAGE = [(17, -0.5), (3, -0.7)]


class Server:
    """kind: "vllm" or "sglang". most: likeliest tokens of a row; 0: as usual. positions: of the longest text.

    cached: prefixes whose keys and values it holds. asked: (tokens of the text, tokens to be written) so far.
    """

    def __init__(self, kind: str, most: int = 0, key: str = "", positions: int = 128, details: bool = True) -> None:
        self.kind, self.key, self.positions, self.details = kind, key, positions, details
        self.cut = False  # it sends half of a reply
        self.most = most or (64 if kind == "sglang" else 20)
        self.cached, self.asked = set[tuple[int, ...]](), list[tuple[int, int]]()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "owned_by": self.kind, "max_model_len": self.positions}]}
        if path in ("/version", "/get_server_info"):
            return 200, {"version": "9.8"}
        known = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
        return getattr(self, f"_{self.kind}")(body) if path == known[self.kind] else (404, {"detail": "Not Found"})

    def _decoded(self, text: list[int], count: int) -> tuple[list[int], list[list[tuple[int, float]]]]:
        """Written tokens, and the likeliest tokens behind each token of the text and of those."""
        assert len(text) + count <= self.positions
        self.asked.append((len(text), count))
        tokens = list(text)
        for _ in range(count):
            rows = MODEL(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
            tokens.append(int(rows[-1].argmax()))
        best = rows.topk(self.most)
        return tokens[len(text) :], [
            list(zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _vllm(self, body: Any) -> tuple[int, Any]:
        text, sampling = body["token_ids"], body["sampling_params"]
        assert sampling["temperature"] == 0 and sampling["detokenize"] is False
        if sampling["logprobs"] > self.most:
            return 400, {"error": {"message": f"Requested sample logprobs of {sampling['logprobs']}"}}
        written, rows = self._decoded(text, sampling["max_tokens"])
        whole = [tuple(text[:end]) for end in range(BLOCK, len(text), BLOCK)]
        cached = BLOCK * next((at for at, each in enumerate(whole) if each not in self.cached), len(whole))
        self.cached.update(tuple([*text, *written][:end]) for end in range(BLOCK, len(text) + len(written), BLOCK))
        read = None
        if "prompt_logprobs" in sampling:
            assert sampling["skip_reading_prefix_cache"] is False
            if cached % 8 == 4:  # it was not a number
                return 400, {"error": {"message": "Out of range float values are not JSON compliant"}}
            shown = [GARBAGE if at < cached else rows[at] for at in range(len(text) - 1)]
            read = [None, *({str(token): {"logprob": value, "rank": 1} for token, value in row} for row in shown)]
        content = [
            {"token_id": token, "logprob": 0.0, "top_logprobs": [{"token_id": t, "logprob": v} for t, v in row]}
            for token, row in zip(written, rows[len(text) - 1 :], strict=True)
        ]
        return 200, {
            "choices": [{"index": 0, "token_ids": written, "logprobs": {"content": content}}],
            "prompt_logprobs": read,
            "usage": {"prompt_tokens_details": {"cached_tokens": cached} if self.details else None},
        }

    def _sglang(self, body: Any) -> tuple[int, Any]:
        """As docs.sglang.ai has it: [log probability, id, text], of the prompt from `logprob_start_len` on."""
        assert body["return_logprob"] is True and body["sampling_params"]["temperature"] == 0
        text, begin = body["input_ids"], body["logprob_start_len"]
        written, rows = self._decoded(text, body["sampling_params"]["max_new_tokens"])
        named = [[[value, token, None] for token, value in row[: body["top_logprobs_num"]]] for row in rows]
        told = {
            "input_token_logprobs": [[None, text[begin], None], *([-1.0, token, None] for token in text[begin + 1 :])],
            "input_top_logprobs": [None, *named[begin : len(text) - 1]],
            "output_token_logprobs": [[-1.0, token, None] for token in written],
            "output_top_logprobs": named[len(text) - 1 :],
        }
        return 200, {"text": "", "output_ids": written, "meta_info": told}


@contextmanager
def answering(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                status, said = 401, {"error": "Unauthorized"}
            else:
                status, said = server.answer(self.path, json.loads(body) if body else None)
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if server.cut else data)
            self.close_connection |= server.cut

        def log_message(self, *_: object) -> None: ...

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        listener.shutdown()
        listener.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upstream")
    save_tiny_drafter(folder / "drafter", MODEL, save_tiny_target(folder / "target", MODEL))
    return folder


def verifier(folder: Path, url: str, **more: Any) -> Verifier:
    values = {"max_model_len": 120, "max_nodes": 24, "kv_tokens": 256, "max_sessions": 32, "tree_budget": 24, **more}
    paths = {"model": str(folder / "target"), "drafter": folder / "drafter"}
    return load_verifier(Settings(engine="upstream", upstream=url, **paths, **values))


SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_k=9, seed=5), Sampling(temperature=1.1, top_k=20, top_p=0.8)]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_texts_are_those_of_plain_decoding(folder: Path, kind: str) -> None:
    """Through random trees and streams in turn, with evictions, and with prefixes that the server has cached."""
    server, rng = Server(kind), Random(3)
    with answering(server) as url, started(verifier(folder, url)) as direct:
        assert direct.verifier.arithmetic == f"upstream-{kind}-9.8"
        for sampling in [*SAMPLINGS, *SAMPLINGS[:2]]:  # the last two: of texts that were asked for before
            truth = plain_decode(MODEL, PROMPT, sampling, 60, eos_ids=())
            end = truth.index(3) if 3 in truth else len(truth)
            text, session, seq, accepted = list(PROMPT), os.urandom(16), 0, 0
            _, rows = direct.open(session, PROMPT, sampling=sampling)
            assert len(rows) == 0
            while len(text) < len(PROMPT) + min(end, 45):
                seq += 1
                if rng.random() < 0.3:
                    _, replies = direct.submit(session, Generate(0, seq, len(text), 6))
                    got, finish = list[int](), 0
                    while len(got) < 6 and not finish:
                        reply = replies.get(timeout=HANG)
                        assert isinstance(reply, Verdict) and not reply.rows
                        got.append(reply.bonus)
                        finish = reply.finish
                    text += got
                else:
                    tree = random_tree(rng, truth[len(text) - 3 :], VOCAB)
                    reply = direct.verify(session, seq, len(text), tree).get(timeout=HANG)
                    assert isinstance(reply, Verdict) and not reply.rows
                    text += [*(tree.tokens[node] for node in reply.accepted), reply.bonus]
                    accepted += len(reply.accepted)
                assert text[3:] == truth[: len(text) - 3]
            assert accepted


def test_a_stream_asks_for_more_tokens_the_longer_it_goes_on(folder: Path) -> None:
    server = Server("vllm", positions=64)
    with answering(server) as url, started(verifier(folder, url, max_model_len=64)) as direct:
        prompt = [5] * 20
        truth = plain_decode(MODEL, prompt, Sampling(), 40, eos_ids=())
        assert 3 not in truth
        direct.open(session := os.urandom(16), prompt)
        server.asked.clear()
        _, replies = direct.submit(session, Generate(0, 1, 20, 44))
        got = [replies.get(timeout=HANG) for _ in range(44)]
        assert [reply.bonus for reply in got][:40] == truth  # type: ignore[union-attr]
        assert [count for _, count in server.asked] == [1, 2, 4, 8, 16, 13]  # the last ends the context


def test_what_is_not_exact_is_refused(folder: Path) -> None:
    with answering(Server("sglang")) as url, serve(loaded := verifier(folder, url)) as address:
        client = Client(address, Hello(1, loaded.target_hash, loaded.drafter_hash))
        assert client.welcome.constraints == 0
        for sampling in (Sampling(temperature=0.5), Sampling(temperature=0.5, top_k=65)):
            client.send(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 0, sampling))
            refused = client.receive(Error)
            assert refused.code == ERR_BOUNDS and "the 64 likeliest tokens" in refused.text
        held = Constraint(3, 0.5, 0.0, *pack_bias({9: 1.0}))
        client.send(Open(0, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling(), held))
        assert "does not support biases" in client.receive(Error).text
        url = f"http://{address}/v1/chat/completions"
        asked = {"model": "x", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 4}
        asked["model"] = httpx.get(f"http://{address}/v1/models").json()["data"][0]["id"]
        for wrong, field in (({"temperature": 1}, "top_k"), ({"temperature": 0, "logit_bias": {"9": 3}}, "logit_bias")):
            said = httpx.post(url, json={**asked, **wrong}, timeout=HANG)
            assert (said.status_code, said.json()["error"]["param"]) == (400, field)
        said = httpx.post(url, json={**asked, "temperature": 0, "logprobs": True, "top_logprobs": 2}, timeout=HANG)
        words = [each["token"].strip() for each in said.json()["choices"][0]["logprobs"]["content"]]
        assert words == [f"w{token}" for token in plain_decode(MODEL, [1, 5, 6, 3], Sampling(), 4, eos_ids=())]


def test_servers_that_lack_something_are_named_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(Server("vllm", details=False)) as url, pytest.raises(TargetError, match="prompt-tokens-details"):
        connect(url, VOCAB)
    with answering(Server("llamacpp")) as url, pytest.raises(TargetError, match="'llamacpp' serves there"):
        connect(url, VOCAB)
    with answering(Server("vllm", most=5, key="s3cret")) as url:
        with pytest.raises(TargetError, match=KEY_VARIABLE):
            connect(url, VOCAB)
        monkeypatch.setenv(KEY_VARIABLE, "s3cret")
        assert connect(url, VOCAB).top == 1
    with pytest.raises(TargetError, match=r"no answer: .*refused"):
        verifier(folder, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match="go together"):
        Settings(engine="upstream")


def too_few(said: Any) -> None:
    del said["prompt_logprobs"][-1]


def narrow(said: Any) -> None:
    row = said["prompt_logprobs"][-1]
    del row[next(iter(row))]


def unwritten(said: Any) -> None:
    said["choices"][0]["token_ids"] = []


def unread_memory(said: Any) -> None:
    for row in said["prompt_logprobs"][-1].values():
        row["logprob"] = 7e12


def unknown_token(said: Any) -> None:
    said["prompt_logprobs"][-1][str(VOCAB)] = {"logprob": -9.0, "rank": 21}


def no_number(said: Any) -> None:
    said["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] = None


def nothing(said: Any) -> None:
    said.clear()


@pytest.mark.parametrize("spoil", [too_few, narrow, unwritten, unread_memory, unknown_token, no_number, nothing])
def test_a_reply_that_is_not_what_was_asked_for_fails_the_step(folder: Path, spoil: Callable[[Any], None]) -> None:
    """Else its rows would be taken for those of other tokens."""
    truth, server, spoilt = plain_decode(MODEL, PROMPT, Sampling(), 4, eos_ids=()), Server("vllm"), False

    def answer(path: str, body: Any) -> tuple[int, Any]:
        status, said = alive(path, body)
        if spoilt and status == 200:
            spoil(said)
        return status, said

    alive, server.answer = server.answer, answer  # type: ignore[method-assign]
    with answering(server) as url, started(verifier(folder, url)) as direct:
        for spoilt in (True, False):
            direct.open(session := os.urandom(16), PROMPT)
            verdict = direct.verify(session, 1, 3, TokenTree.chain(truth[:3])).get(timeout=HANG)
            if spoilt:
                assert isinstance(verdict, Error) and verdict.code == ERR_INTERNAL
        assert isinstance(verdict, Verdict) and (list(verdict.accepted), verdict.bonus) == ([0, 1, 2], truth[3])


def test_a_slow_server_is_asked_once_and_half_a_reply_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the time-out would count as a step that hangs."""
    monkeypatch.setattr("cloud.upstream_engine.client.TIMEOUT", 0.5)
    server, asked, done = Server("vllm"), list[str](), threading.Event()

    def slowly(path: str, body: Any) -> tuple[int, Any]:
        asked.append(path)
        done.wait(HANG)
        return 200, {}

    with answering(server) as url:
        assert call(url, "/version") == {"version": "9.8"}
        with monkeypatch.context() as patch:
            patch.setattr(server, "answer", slowly)
            with pytest.raises(UpstreamError, match="timed out"):
                call(url, "/version")  # by the connection that is there
            done.set()
        assert asked == ["/version"] and call(url, "/version") == {"version": "9.8"}
        server.cut = True
        with pytest.raises(UpstreamError, match="no answer: IncompleteRead"):
            call(url, "/version")


def test_a_server_of_another_model_is_refused_at_start(folder: Path) -> None:
    with answering(Server("vllm")) as url, pytest.raises(TargetError, match="it serves another model"):
        connect(url, 10)


def test_a_server_that_dies_fails_the_step_and_one_that_returns_goes_on(folder: Path) -> None:
    truth = plain_decode(MODEL, PROMPT, Sampling(), 3, eos_ids=())
    server = Server("vllm")
    with answering(server) as url, started(verifier(folder, url)) as direct:
        direct.open(session := os.urandom(16), PROMPT)
        alive, server.answer = server.answer, lambda path, body: (500, {})  # type: ignore[method-assign]
        failed = direct.verify(session, 1, 3, TokenTree.chain(truth[:2])).get(timeout=HANG)
        assert isinstance(failed, Error) and failed.code == ERR_INTERNAL
        server.answer = alive  # type: ignore[method-assign]
        direct.open(session, PROMPT)
        verdict = direct.verify(session, 1, 3, TokenTree.chain(truth[:2])).get(timeout=HANG)
        assert isinstance(verdict, Verdict) and (list(verdict.accepted), verdict.bonus) == ([0, 1], truth[2])
