"""Web pages: those that are allowed can work with the verifier, others cannot, whatever name they point to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from cloud.auth import main as make_token
from cloud.server.accounts import Accounts
from cloud.server.service import Verifier
from outrider_core.chat.tokenizer import chat_tokenizer_of
from tests.cloud.drive import Client, make_verifier, serve
from tests.tiny import tiny_model, tiny_tokenizer

GOOD, EVIL = "https://good.example", "http://evil.example"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 3}


def ready_made() -> Verifier:
    verifier = make_verifier(tiny_model(), (), kv_tokens=2048)
    verifier.tokenizer, verifier.model_name = chat_tokenizer_of(tiny_tokenizer()), "tiny"
    return verifier


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve(ready_made(), allow_origin=[GOOD, "https://verifier.example:8765"]) as address:
        yield address


def preflight(address: str, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    return httpx.options(f"http://{address}/v1/chat/completions", headers=headers)


def test_an_allowed_page_reads_answers_streams_and_errors(address: str) -> None:
    asked = preflight(address, GOOD)
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == GOOD
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    url = f"http://{address}/v1/chat/completions"
    for ask, status in ((ASK, 200), ({**ASK, "stream": True}, 200), ({**ASK, "n": 9}, 400)):
        answer = httpx.post(url, json=ask, headers={"Origin": GOOD})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == GOOD


def test_a_page_that_is_not_allowed_gets_no_leave(address: str) -> None:
    asked = preflight(address, EVIL)
    assert asked.status_code == 400 and "access-control-allow-origin" not in asked.headers
    answer = httpx.post(f"http://{address}/v1/chat/completions", json=ASK, headers={"Origin": EVIL})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_without_allowed_pages_there_is_no_cors() -> None:
    with serve(ready_made()) as address:
        assert preflight(address, GOOD).status_code == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "[", ""])
def test_a_rebound_name_gets_nothing(address: str, host: str) -> None:
    """The page's own name points to this machine: Origin and Host agree, and a GET has no Origin."""
    rebound = {"Host": host}
    assert httpx.get(f"http://{address}/v1/models", headers=rebound).status_code in (400, 403)
    assert httpx.get(f"http://{address}/metrics", headers=rebound).status_code in (400, 401)
    page = {"Host": host, "Origin": f"http://{host}"}
    assert httpx.post(f"http://{address}/v1/chat/completions", json=ASK, headers=page).status_code in (400, 403)
    with pytest.raises(InvalidStatus) as refused:
        Client(address, headers=page)
    assert refused.value.response.status_code in (400, 403)


@pytest.mark.parametrize("host", ["127.0.0.1:9", "localhost", "[::1]:8765", "verifier.example", "192.0.2.7"])
def test_names_that_nobody_else_can_have_are_served(address: str, host: str) -> None:
    page = {"Host": host, "Origin": f"http://{host}"}
    assert httpx.post(f"http://{address}/v1/chat/completions", json=ASK, headers=page).status_code == 200
    assert httpx.get(f"http://{address}/metrics", headers={"Host": host}).status_code == 200


def test_any_name_will_do_where_a_token_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_token([str(tmp_path / "tokens"), "app"])
    make_token([str(tmp_path / "tokens"), "prometheus"])
    app, prometheus = capsys.readouterr().out.split()
    verifier = ready_made()
    verifier.accounts = Accounts(tmp_path / "tokens")
    with serve(verifier, metrics_account="prometheus") as address:
        headers = {"Host": "public.example", "Origin": "http://public.example", "Authorization": f"Bearer {app}"}
        assert httpx.post(f"http://{address}/v1/chat/completions", json=ASK, headers=headers).status_code == 200
        metrics = f"http://{address}/metrics"
        assert httpx.get(metrics).status_code == 200
        behind_a_proxy = {"X-Forwarded-For": "192.0.2.7"}
        replies = [
            httpx.get(metrics, headers={**behind_a_proxy, **token})
            for token in ({}, {"Authorization": f"Bearer {app}"}, {"Authorization": f"Bearer {prometheus}"})
        ]
        assert [reply.status_code for reply in replies] == [401, 401, 200]
        assert 'outrider:account_tokens_total{account="app",' in replies[-1].text


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"])
def test_metrics_are_not_open_through_a_proxy_on_this_machine(address: str, header: str) -> None:
    assert httpx.get(f"http://{address}/metrics", headers={header: "192.0.2.7"}).status_code == 401
