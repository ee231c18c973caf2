"""Prefixes shared over HTTP and WebSockets, by the tokens of the clients."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from cloud.auth import main as make_token
from cloud.server.accounts import Accounts
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Features
from tests.cloud.drive import Client, assert_rows, make_verifier, serve
from tests.tiny import plain_decode, tiny_model, tiny_tokenizer
from tests.waiting import HANG

SYSTEM = [random.Random(0).randrange(4, 199) for _ in range(300)]


def prompt(user: int) -> list[int]:
    """What the tokenizer makes of system prompt and question."""
    return [1, *SYSTEM, 3, user, 3]


def test_completions_share_within_their_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight at a time; with a token file that is the default. A device of the account shares with them."""
    tokens = {}
    for name in ("one", "two"):
        assert make_token([str(tmp_path / "tokens"), name]) == 0
        tokens[name] = capsys.readouterr().out.strip()
    model = tiny_model("llama", seed=4, positions=1024)
    limits = {"max_model_len": 512, "kv_tokens": 8192, "prefill_chunk": 128}
    verifier = make_verifier(model, (), accounts=Accounts(tmp_path / "tokens"), **limits)
    verifier.tokenizer, verifier.model_name = chat_tokenizer_of(tiny_tokenizer()), "tiny"

    def ask(account: str, user: int) -> list[int]:
        texts = {"system": " ".join(f"w{token}" for token in SYSTEM), "user": f"w{user}"}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        body = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True}
        headers = {"Authorization": f"Bearer {tokens[account]}"}
        reply = httpx.post(f"http://{address}/v1/chat/completions", json=body, headers=headers, timeout=HANG)
        assert reply.status_code == 200, reply.text
        words = [each["token"].strip() for each in reply.json()["choices"][0]["logprobs"]["content"]]
        return [verifier.tokenizer.encode_prompt(word)[-1] for word in words]  # type: ignore[union-attr]

    def expected(user: int) -> list[int]:
        return plain_decode(model, prompt(user), Sampling(), 6, eos_ids=())

    def ran() -> float:
        return verifier.metrics.registry.get_sample_value("outrider:prompt_tokens_total") or 0.0

    with serve(verifier) as address:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(partial(ask, "one"), range(10, 18)))
        assert answers == [expected(user) for user in range(10, 18)]
        assert ran() == 302 + 8  # and of each the token that its user wrote
        assert ask("one", 20) == expected(20) and ran() == 302 + 9
        with Client(address, token=tokens["one"]) as client:
            client.open(prompt(30), have=0)
            features = client.any()
            assert isinstance(features, Features)
            assert_rows(model, verifier, prompt(30), features.start, features.rows)
        assert ran() == 302 + 10
        assert ask("two", 20) == expected(20) and ran() == 2 * 302 + 11
