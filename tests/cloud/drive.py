"""Drive a verifier in tests: in process (Direct) and over a real socket (serve, Client)."""

from __future__ import annotations

import os
import queue
import random
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import uvicorn
from transformers import DynamicCache
from websockets.sync.client import ClientConnection, connect

from cloud.app import App
from cloud.engine.features import PackedRows
from cloud.engine.request import EngineRequest, Reply
from cloud.engine.served_model import ServedModel
from cloud.http_server import uvicorn_config
from cloud.server.accounts import Accounts
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import torch_model
from outrider_core.models.moa import server_half
from outrider_core.models.target import TargetFiles
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.rows import pack_rows, unpack_rows
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import (
    SUBPROTOCOL,
    ClientMessage,
    Features,
    Generate,
    Hello,
    Open,
    Opened,
    ServerMessage,
    Verdict,
    Verify,
    Welcome,
    decode_server,
    encode,
    pack_ids,
    pack_tree,
)
from tests.tiny import tiny_drafter_config, tiny_target
from tests.waiting import HANG, until

DRAFTER_HASH = "tiny-drafter"
HELLO = Hello(1, "tiny-target", DRAFTER_HASH)
GREEDY = Sampling()
#: constants of the product that a test may set for its server
GATE_LIMITS = ("hello_seconds", "request_seconds", "message_seconds", "max_connections")


#: of a tiny model that vLLM has kernels for
FOR_VLLM = {"hidden": 128, "dtype": torch.float32}
Kind = Literal["torch", "vllm"]
#: that kind among a test's parameters
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)


def made_for(engine: Kind) -> dict[str, Any]:
    """Options of `tiny_model` that `make_verifier` takes with this engine."""
    return FOR_VLLM if engine == "vllm" else {}


def make_verifier(
    model: Any,
    eos_ids: tuple[int, ...] = (3,),
    *,
    prefill_chunk: int = 16,
    engine: Kind = "torch",
    accounts: Accounts | None = None,
    **settings: Any,
) -> Verifier:
    """A verifier of the tiny model, not started."""
    values = {"max_model_len": 128, "max_nodes": 24, "kv_tokens": 512, "max_sessions": 32}
    drafter = (*tiny_drafter_config(model), DRAFTER_HASH)
    chosen = Settings(**{**values, **settings})
    verifier = Verifier(_served(model, eos_ids, engine, drafter, chosen), chosen, accounts)
    verifier.batcher.watchdog.seconds = HANG
    verifier.engine.mask_seconds = HANG  # a busy machine changes no step
    return in_chunks(verifier, prefill_chunk)


def _served(model: Any, eos_ids: tuple[int, ...], engine: Kind, drafter: Any, settings: Settings) -> ServedModel:
    if engine == "vllm":
        from cloud.vllm_engine.loading import vllm_model

        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            files = TargetFiles(model.config, None, "tiny", Path(folder), "tiny-target", eos_ids)
            return vllm_model(files, drafter, settings)
    return torch_model(tiny_target(model, eos_ids), drafter, settings)


def in_chunks(verifier: Verifier, tokens: int) -> Verifier:
    """The same verifier, which prefills at most this many tokens a step."""
    verifier.scheduler.prefill_chunk = tokens
    return verifier


@contextmanager
def started(verifier: Verifier) -> Iterator[Direct]:
    verifier.start()
    try:
        yield Direct(verifier)
    finally:
        verifier.stop()
        assert not verifier.alive


class Direct:
    """Requests straight to the engine thread."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    def submit(self, session: bytes, message: Any, **content: Any) -> tuple[EngineRequest, queue.Queue[Reply]]:
        replies: queue.Queue[Reply] = queue.Queue()
        request = EngineRequest(session, message, lambda reply, done: replies.put(reply), **content)
        self.verifier.submit(request)
        return request, replies

    def open(
        self,
        session: bytes,
        tokens: Sequence[int],
        seq: int = 0,
        sampling: Sampling = GREEDY,
        have: int = 0,
        rules: Rules | None = None,
    ) -> tuple[Opened, PackedRows]:
        """OPEN and wait for the prefill."""
        request = Open(0, session, seq, pack_ids(list(tokens)), have, sampling)
        _, replies = self.submit(session, request, tokens=list(tokens), rules=rules)
        opened, rows = replies.get(timeout=HANG), replies.get(timeout=HANG)
        assert isinstance(opened, Opened) and isinstance(rows, PackedRows), (opened, rows)
        return opened, rows

    def verify(self, session: bytes, seq: int, base_len: int, tree: TokenTree) -> queue.Queue[Reply]:
        request = Verify(0, seq, base_len, *pack_tree(tree))
        return self.submit(session, request, tree=tree)[1]


@contextmanager
def serve(verifier: Verifier, uvicorn_options: dict[str, Any] | None = None, **options: Any) -> Iterator[str]:
    """A real uvicorn server on loopback; yields host:port. options: settings, or of its gate.

    Clients may take their time, unless the options say otherwise.
    """
    options = {"hello_seconds": HANG, "request_seconds": HANG, "message_seconds": HANG, **options}
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    limits = {name: options.pop(name) for name in GATE_LIMITS if name in options}
    app = App(verifier, Settings(**options))
    vars(app.gate).update(limits)
    config = uvicorn_config(app, **(uvicorn_options or {}))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert until(lambda: server.started)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(HANG)
        assert not thread.is_alive() and not verifier.alive


class Client:
    """A device on a real socket, blocking."""

    def __init__(
        self, address: str, hello: Hello | None = HELLO, token: str = "", headers: dict[str, str] | None = None
    ) -> None:
        protocols: Any = [SUBPROTOCOL]
        self.socket: ClientConnection = connect(
            f"ws://{address}/v1/verify",
            subprotocols=protocols,
            compression=None,
            open_timeout=HANG,
            additional_headers=headers or ({"Authorization": f"Bearer {token}"} if token else {}),
        )
        if hello is not None:
            self.send(hello)
            self.welcome = self.receive(Welcome)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message: ClientMessage) -> None:
        self.socket.send(encode(message))

    def frame(self) -> bytes:
        frame = self.socket.recv(timeout=HANG)
        assert isinstance(frame, bytes)
        return frame

    def any(self) -> ServerMessage:
        return decode_server(self.frame())

    def receive(self, kind: type[Any]) -> Any:
        """The next message, which must be of this kind; FEATURES are skipped where others are wanted."""
        while True:
            message = self.any()
            if isinstance(message, kind):
                return message
            assert isinstance(message, Features), message

    def open(
        self,
        tokens: Sequence[int],
        stream: int = 0,
        session: bytes | None = None,
        seq: int = 0,
        have: int = 1 << 20,
        sampling: Sampling = GREEDY,
    ) -> Opened:
        self.send(Open(stream, session or os.urandom(16), seq, pack_ids(list(tokens)), have, sampling))
        opened: Opened = self.receive(Opened)
        return opened

    def verify(self, seq: int, base_len: int, tree: TokenTree, stream: int = 0) -> Verdict:
        self.send(Verify(stream, seq, base_len, *pack_tree(tree)))
        verdict: Verdict = self.receive(Verdict)
        return verdict

    def generate(self, seq: int, base_len: int, max_new: int, stream: int = 0) -> list[int]:
        self.send(Generate(stream, seq, base_len, max_new))
        tokens: list[int] = []
        while True:
            verdict = self.receive(Verdict)
            assert (verdict.seq, verdict.accepted, verdict.rows) == (seq, b"", b"")
            assert verdict.base_len == base_len + len(tokens)
            tokens.append(verdict.bonus)
            if verdict.finish or len(tokens) == max_new:
                return tokens


def random_tree(rng: random.Random, truth: Sequence[int], vocab: int, max_nodes: int = 12) -> TokenTree:
    """A random tree that holds some of the true continuation, its nodes in random (valid) order."""
    depth = rng.choice([0, 0, 1, 2, 3, 5])
    paths = [list(truth[:depth])] if depth else []
    for _ in range(rng.randrange(5)):
        path = list(truth[: rng.randrange(depth + 1)])
        paths.append(path + [rng.randrange(vocab) for _ in range(rng.randrange(1, 4))])
    rng.shuffle(paths)
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, ...], int] = {(): ROOT}
    while paths:
        path = rng.choice(paths)  # nodes of several paths take turns, so that paths are not contiguous
        prefix = next(tuple(path[:n]) for n in range(len(path) + 1) if tuple(path[:n]) not in nodes or n == len(path))
        if prefix not in nodes and len(tokens) < max_nodes:
            nodes[prefix] = len(tokens)
            tokens.append(prefix[-1])
            parents.append(nodes[prefix[:-1]])
        if len(prefix) == len(path) or len(tokens) >= max_nodes:
            paths.remove(path)
    return TokenTree(tuple(tokens), tuple(parents))


def expected_path(tree: TokenTree, truth: Sequence[int]) -> list[int]:
    """Nodes that must be accepted where the target's continuation, longer than the tree is deep, is `truth`."""
    assert len(truth) > max(tree.depths, default=0)
    node, path = ROOT, list[int]()
    for token in truth:
        child = tree.child(node, token)
        if child is None:
            break
        path.append(node := child)
    return path


@torch.inference_mode()
def reference_rows(model: Any, tokens: Sequence[int]) -> bytes:
    """Packed rows of all positions from one plain forward of the unmodified model."""
    config, tensors = tiny_drafter_config(model)
    cache = DynamicCache()  # of all tokens, also in layers with a sliding window
    model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)  # as older releases call it
    parts = []
    for layer in config.target_layers:
        key, value = cache.layers[layer].keys[0], cache.layers[layer].values[0]  # [heads, T, head_dim]
        heads = [part[head] for head in range(key.shape[0]) for part in (key, value)]
        parts.append(torch.cat(heads, -1))
    kv = torch.stack(parts, 1).float()
    return pack_rows(server_half(config, tensors)(kv, torch.arange(len(tokens))).numpy())


def assert_rows(
    model: Any, verifier: Verifier, tokens: Sequence[int], start: int, packed: bytes, count: int | None = None
) -> None:
    """`packed` are the rows from `start` on of this text, `count` of them, to within one int8 step."""
    shape = verifier.features.shape
    got = unpack_rows(packed, shape)
    want = unpack_rows(reference_rows(model, tokens), shape)[start : start + len(got)]
    assert got.shape == want.shape and len(got) and count in (None, len(got))
    step = abs(want).max(-1, keepdims=True) / 127 * 1.01 + 1e-6
    assert (abs(got - want) <= step).all()
    assert abs(want).max() > 0.01
