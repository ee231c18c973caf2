"""Tokens, limits, TLS and origins: the file, the buckets, and the real server."""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from cloud.auth import main
from cloud.server.accounts import Accounts, AuthError
from cloud.server.limits import Account, AccountLimits
from cloud.server.service import Verifier
from edge_runtime.link.events import LinkDown, LinkEvent, LinkRefused, LinkUp
from edge_runtime.link.websocket import Link
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_BUSY, Error, Generate, Open, Opened, Verdict, Verify, pack_ids, pack_tree
from outrider_core.serving import bearer
from tests.cloud.drive import HELLO, Client, make_verifier, serve
from tests.tiny import plain_decode, tiny_model, tiny_tokenizer
from tests.waiting import HANG, until

MODEL = tiny_model("llama", seed=4)
PROMPT = [10, 20, 30, 40, 50]
EXPIRY = "outrider:token_expiry_timestamp_seconds"
TRUTH = plain_decode(MODEL, PROMPT, Sampling(), 20, eos_ids=())


def make_token(file: Path, name: str, *limits: str, capsys: Any) -> str:
    assert main([str(file), name, *limits]) == 0
    return str(capsys.readouterr().out.strip())


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_tokens_are_made_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"
    first = make_token(file, "app-1", capsys=capsys)
    second = make_token(file, "app-2", "--sessions", "3", "--nodes", "10.5", capsys=capsys)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert first not in file.read_text() and len(first) >= 40
    accounts = Accounts(file)
    one, two = accounts.authenticate(first), accounts.authenticate(second)
    assert one is not None and two is not None
    assert (one.name, one.limits) == ("app-1", AccountLimits())
    assert (two.limits.sessions, two.limits.nodes, two.limits.verifies) == (3, 10.5, AccountLimits.verifies)
    for wrong in (None, "", first[:-1], first + "a", "\udcff"):
        assert accounts.authenticate(wrong) is None
    assert main([str(file), "app-1"]) == 2 and "twice" in capsys.readouterr().err
    assert len(Accounts(file)) == 2


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: Any) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "nowhere" / "tokens", "No such file or directory")):
        assert main([str(path), "app-1"]) == 2
        assert capsys.readouterr().err == f"auth: {path}: {why}\n"


@pytest.mark.parametrize("before", [None, "", "broken\n"])
def test_a_refused_name_leaves_the_file_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str | None
) -> None:
    """An empty one would keep a verifier from starting."""
    path = tmp_path / "tokens"
    if before is not None:
        path.write_text(before)
    assert main([str(path), "two words"]) == 2
    assert "nothing was added" in capsys.readouterr().err
    assert (path.read_text() if path.exists() else None) == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no tokens"),
        ("# only a comment\n", "no tokens"),
        ("app\n", "line 1"),
        ("\napp 1234\n", "line 2"),
        ("a/b " + "0" * 64, "line 1"),
        ("app " + "0" * 64 + " sessions=many", "sessions=many"),
        ("app " + "0" * 64 + " wishes=3", "wishes=3"),
        ("app " + "0" * 64 + " nodes=0", "above 0"),
        ("app " + "0" * 64 + " nodes=nan", "above 0"),
        ("a " + "0" * 64 + "\nb " + "0" * 64, "twice"),
        ("a " + "0" * 64 + " 2027-13-01", "line 1: not a date such as 2027-06-30"),
        ("a " + "0" * 64 + " nodes=1 2027-06-30", "2027-06-30"),
    ],
)
def test_bad_files_say_where(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(AuthError, match="tokens") as error:
        Accounts(tmp_path / "tokens")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_reload_revokes_and_keeps_debts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, clock = tmp_path / "tokens", Clock()
    stays, goes = (make_token(file, name, "--verifies", "1", capsys=capsys) for name in ("stays", "goes"))
    accounts = Accounts(file, clock)
    kept, gone = accounts.authenticate(stays), accounts.authenticate(goes)
    assert kept is not None and gone is not None
    kept.spend(verifies=50)
    file.write_text("".join(line for line in file.read_text().splitlines(True) if line.startswith("stays")))
    accounts.reload()
    assert accounts.authenticate(stays) is kept and not kept.revoked
    assert gone.revoked and accounts.authenticate(goes) is None
    assert kept.charge(verifies=1) > 40
    file.write_text("nonsense")
    with pytest.raises(AuthError):
        accounts.reload()
    assert accounts.authenticate(stays) is kept


YESTERDAY, TOMORROW = (datetime.now(UTC).date() + timedelta(days=days) for days in (-1, 1))


def test_a_token_is_valid_through_its_last_day(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last, never = date(2027, 6, 30), date.max
    with_date = Account("a", AccountLimits(), expires=last)
    assert datetime.fromtimestamp(with_date.ends_at, UTC).date() == last
    assert datetime.fromtimestamp(with_date.ends_at + 1, UTC) > datetime(2027, 7, 1, tzinfo=UTC)
    assert not Account("a", AccountLimits(), expires=never).expired and not Account("a", AccountLimits()).expired
    file = tmp_path / "tokens"
    token = make_token(file, "app", "--expires", TOMORROW.isoformat(), "--nodes", "7", capsys=capsys)
    accounts = Accounts(file)
    account = accounts.authenticate(token)
    assert account is not None and (account.expires, account.limits.nodes) == (TOMORROW, 7) and not account.expired
    file.write_text(file.read_text().replace(TOMORROW.isoformat(), YESTERDAY.isoformat()))
    assert accounts.reload() == (0, 0)  # another date is no other token
    assert accounts.authenticate(token) is account and account.expired and not account.revoked


def test_the_command_says_what_to_do_with_its_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "tokens"), "app"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.split()) == 1  # for `TOKEN=$(python -m cloud.auth ...)`
    assert all(word in printed.err for word in ("OUTRIDER_TOKEN", "api_key", "SIGHUP")) and printed.err.count("\n") == 1
    with pytest.raises(SystemExit):
        main([str(tmp_path / "tokens"), "other", "--expires", "soon"])


def test_an_expired_token_is_refused_logged_once_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    old = make_token(tmp_path / "tokens", "old", "--expires", YESTERDAY.isoformat(), capsys=capsys)
    new = make_token(tmp_path / "tokens", "new", "--expires", TOMORROW.isoformat(), capsys=capsys)
    with caplog.at_level("INFO", "cloud"), serving(tmp_path) as (address, verifier):
        with pytest.raises(InvalidStatus) as refused:
            Client(address, token=old)
        assert refused.value.response.status_code == 401
        assert f"expired on {YESTERDAY}".encode() in (refused.value.response.body or b"")
        with Client(address, token=new) as client:
            client.open(PROMPT)
            file = tmp_path / "tokens"
            file.write_text(file.read_text().replace(TOMORROW.isoformat(), YESTERDAY.isoformat()))
            verifier.reload_tokens()
            client.send(Verify(0, 1, 5, *pack_tree(TokenTree())))
            with pytest.raises(ConnectionClosed) as closed:
                client.socket.recv(timeout=HANG)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4003
        with pytest.raises(InvalidStatus):
            Client(address, token=old)
        text = verifier.metrics.text().decode()
    assert 'outrider:refused_total{reason="expired_token"} 2.0' in text
    [ends] = [float(line.split()[1]) for line in text.splitlines() if line.startswith(EXPIRY + '{account="new"}')]
    assert datetime.fromtimestamp(ends, UTC).date() == YESTERDAY
    lines = [record.getMessage() for record in caplog.records]
    assert [line.startswith("expired token refused") and "'old'" in line for line in lines].count(True) == 1
    [reloaded] = [line for line in lines if line.startswith("tokens read again")]
    assert "'new': 0" in reloaded and "'revoked': 0" in reloaded and "'expired': ['old', 'new']" in reloaded


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 200)), max_size=60), st.floats(0.5, 50))
def test_a_bucket_never_gives_more_than_its_rate_for_long(steps: list[tuple[float, int]], rate: float) -> None:
    clock = Clock()
    account, taken, biggest, start = Account("a", AccountLimits(nodes=rate), clock), 0, 0, clock.now
    for pause, amount in steps:
        clock.now += pause
        wait = account.charge(nodes=amount)
        if wait == 0:
            taken, biggest = taken + amount, max(biggest, amount)
            assert taken - biggest <= rate * (clock.now - start + 3.0) + 1e-6
        else:
            clock.now += wait
            assert account.charge(nodes=1) == 0  # what it says is enough
            taken += 1
            biggest = max(biggest, 1)


def test_sessions_of_two_accounts_never_meet() -> None:
    session = os.urandom(16)
    names = {Account(name, AccountLimits()).scoped(session) for name in ("", "a", "b", "ab")}
    assert len(names) == 4 and all(len(name) == 16 for name in names)


def test_where_a_token_may_stand() -> None:
    assert bearer("Bearer abc") == bearer("bearer  abc ") == bearer(None, ["outrider.v1", "bearer.abc"]) == "abc"
    assert bearer("Basic abc") is bearer("Bearer ") is bearer(None, ["outrider.v1"]) is None


@pytest.fixture
def tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    limits = {
        "free": [],
        "few": ["--sessions", "2"],
        "slow": ["--verifies", "1"],
        "small": ["--nodes", "2"],
        "short": ["--prefill", "10"],
    }
    return {name: make_token(tmp_path / "tokens", name, *given, capsys=capsys) for name, given in limits.items()}


@contextmanager
def serving(tmp_path: Path, clock: Clock | None = None, **options: Any) -> Iterator[tuple[str, Verifier]]:
    """clock: of the rates; by default one that stands still."""
    verifier = make_verifier(MODEL, (), kv_tokens=2048)
    verifier.accounts = Accounts(tmp_path / "tokens", clock or Clock())
    with serve(verifier, **options) as address:
        yield address, verifier


def test_no_token_no_service(tmp_path: Path, tokens: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path) as (address, verifier):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {tokens['free']}"}):
            with pytest.raises(InvalidStatus) as refused:
                Client(address, headers=headers)
            assert refused.value.response.status_code == 401
            assert b"Bearer TOKEN" in (refused.value.response.body or b"")
        assert httpx.get(f"http://{address}/readyz").status_code == 200
        with Client(address, token=tokens["free"]) as client:
            client.open(PROMPT)
            assert client.verify(1, 5, TokenTree.chain(TRUTH[:2])).bonus == TRUTH[2]
        browser = connect(
            f"ws://{address}/v1/verify",
            subprotocols=["outrider.v1", f"bearer.{tokens['free']}"],
            compression=None,  # type: ignore[list-item]
        )
        assert browser.subprotocol == "outrider.v1"
        browser.close()
        assert 'outrider:refused_total{reason="token"} 3.0' in verifier.metrics.text().decode()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []  # refusals are no faults


def test_limits_hold_for_all_connections_of_a_token(tmp_path: Path, tokens: dict[str, str]) -> None:
    with serving(tmp_path) as (address, _):
        with Client(address, token=tokens["few"]) as one, Client(address, token=tokens["few"]) as two:
            one.open(PROMPT)
            two.open(PROMPT)
            one.send(Open(1, os.urandom(16), 0, pack_ids(PROMPT), 0, Sampling()))
            error = one.receive(Error)
            assert error.code == ERR_BUSY and error.retry_after_ms > 0 and "2 sessions" in error.text
            two.socket.close()

            def opened() -> bool:
                one.send(Open(1, os.urandom(16), 0, pack_ids(PROMPT), 1 << 20, Sampling()))
                return isinstance(one.any(), Opened)

            assert until(opened)
        with Client(address, token=tokens["free"]) as other:  # nobody else is hurt
            other.open(PROMPT)
            assert other.verify(1, 5, TokenTree()).bonus == TRUTH[0]


@pytest.mark.parametrize(("name", "size"), [("slow", 1), ("small", 4)])
def test_verify_and_node_limits(tmp_path: Path, tokens: dict[str, str], name: str, size: int) -> None:
    clock = Clock()
    with serving(tmp_path, clock) as (address, _), Client(address, token=tokens[name]) as client:
        client.open(PROMPT)
        length, answered, error = 5, 0, None
        for seq in range(1, 10):
            tree = TokenTree.chain(TRUTH[length - 5 : length - 5 + size])
            client.send(Verify(0, seq, length, *pack_tree(tree)))
            reply = client.any()
            if isinstance(reply, Error):
                error = reply
                break
            assert isinstance(reply, Verdict)
            length += len(reply.accepted) + 1
            answered += 1
        assert error is not None and error.code == ERR_BUSY and 1 <= answered <= 4
        assert 100 < error.retry_after_ms < 5000
        clock.now += error.retry_after_ms / 1000
        verdict = client.verify(answered + 1, length, TokenTree())
        assert verdict.bonus == TRUTH[length - 5]


def test_written_tokens_count_as_verifies(tmp_path: Path, tokens: dict[str, str]) -> None:
    with serving(tmp_path) as (address, _), Client(address, token=tokens["slow"]) as client:
        client.open(PROMPT)
        assert client.generate(1, 5, 8) == TRUTH[:8]
        client.send(Generate(0, 2, 13, 2))
        error = client.receive(Error)
        assert error.code == ERR_BUSY and error.retry_after_ms > 4000


def test_prefill_limit(tmp_path: Path, tokens: dict[str, str]) -> None:
    with serving(tmp_path) as (address, _), Client(address, token=tokens["short"]) as client:
        client.open([5] * 100)
        client.send(Open(1, os.urandom(16), 0, pack_ids([5] * 5), 0, Sampling()))
        error = client.receive(Error)
        assert error.code == ERR_BUSY and 5000 < error.retry_after_ms < 9000


def test_revoked_tokens_lose_their_connections(tmp_path: Path, tokens: dict[str, str]) -> None:
    with serving(tmp_path) as (address, verifier):
        client = Client(address, token=tokens["few"])
        client.open(PROMPT)
        file = tmp_path / "tokens"
        file.write_text("".join(line for line in file.read_text().splitlines(True) if not line.startswith("few")))
        verifier.accounts.reload()
        client.send(Verify(0, 1, 5, *pack_tree(TokenTree())))
        with pytest.raises(ConnectionClosed) as closed:
            client.socket.recv(timeout=HANG)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4003


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://evil.example", 403), ("null", 403), ("https://good.example", 101), ("http://{host}", 101), (None, 101)],
)
def test_foreign_web_pages_are_refused(origin: str | None, status: int) -> None:
    verifier = make_verifier(MODEL, ())
    with serve(verifier, allow_origin=["https://good.example"]) as address:
        headers = {} if origin is None else {"Origin": origin.format(host=address)}
        try:
            Client(address, headers=headers).socket.close()
            got = 101
        except InvalidStatus as refused:
            got = refused.response.status_code
        assert got == status


def test_full_house() -> None:
    with serve(make_verifier(MODEL, ()), max_connections=2) as address, Client(address), Client(address):
        with pytest.raises(InvalidStatus) as refused:
            Client(address)
        assert refused.value.response.status_code == 503
        assert httpx.get(f"http://{address}/healthz").status_code == 200


def dial(url: str, **options: Any) -> LinkEvent:
    """The first thing a device's link reports."""

    async def first() -> LinkEvent:
        events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        task = asyncio.create_task(Link(url, HELLO, events.put_nowait, **options).run())
        try:
            return await asyncio.wait_for(events.get(), HANG)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(first())


def test_the_device_over_tls(tmp_path: Path, tokens: dict[str, str]) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    options: dict[str, Any] = {"ssl_context_factory": lambda config, default: context}
    with serving(tmp_path, uvicorn_options=options) as (address, _):
        url = f"wss://localhost:{address.rsplit(':', 1)[1]}"
        trusted = {"ca_file": tmp_path / "ca.pem"}
        assert isinstance(dial(url, token=tokens["free"], **trusted), LinkUp)
        refused = dial(url, token="wrong", **trusted)
        assert isinstance(refused, LinkDown) and refused.refused and "token" in refused.reason
        stranger = dial(url, token=tokens["free"])
        assert isinstance(stranger, LinkDown) and "certificate" in stranger.reason.lower()


def test_the_device_keeps_its_token_to_itself(tmp_path: Path) -> None:
    with pytest.raises(LinkRefused, match="clear text"):
        Link("ws://verifier.example", HELLO, print, token="secret")
    with pytest.raises(LinkRefused, match="no certificates"):
        Link("wss://verifier.example", HELLO, print, ca_file=tmp_path / "none.pem")


def test_http_requests_need_a_token_too(tmp_path: Path, tokens: dict[str, str]) -> None:
    """The same tokens, limits and origins hold for the OpenAI-style endpoints."""
    verifier = make_verifier(MODEL, (), kv_tokens=2048)
    verifier.accounts = Accounts(tmp_path / "tokens", Clock())
    verifier.tokenizer, verifier.model_name = chat_tokenizer_of(tiny_tokenizer()), "tiny"
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 8, "temperature": 0}
    with serve(verifier) as address:
        url = f"http://{address}/v1/chat/completions"
        for path in ("models", "models/tiny"):
            assert httpx.get(f"http://{address}/v1/{path}").status_code == 401
        refused = httpx.post(url, json=ask)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        account = verifier.accounts.authenticate(tokens["free"])
        assert account is not None
        account.expires = YESTERDAY
        refused = httpx.post(url, json=ask, headers={"Authorization": f"Bearer {tokens['free']}"})
        assert refused.status_code == 401 and f"expired on {YESTERDAY}" in refused.json()["error"]["message"]
        headers = {"Authorization": f"Bearer {tokens['slow']}"}
        answer = httpx.post(url, json=ask, headers=headers)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        used = httpx.get(f"http://{address}/metrics").text
        assert 'outrider:account_tokens_total{account="slow",kind="generated"} 8.0' in used
        assert f'_tokens_total{{account="slow",kind="prompt"}} {answer.json()["usage"]["prompt_tokens"] - 1}.0' in used
        assert 'account="free"' not in used  # nothing was answered
        forwarded = httpx.get(f"http://{address}/metrics", headers={**headers, "X-Forwarded-For": "192.0.2.7"})
        assert "outrider:generation_tokens_total 8.0" in forwarded.text and 'account="' not in forwarded.text
        again = httpx.post(url, json=ask, headers=headers)  # eight tokens at one a second are still owed
        assert again.status_code == 429 and int(again.headers["retry-after"]) >= 4
        evil = httpx.get(f"http://{address}/v1/models", headers={**headers, "Origin": "https://evil.example"})
        assert evil.status_code == 403
        assert httpx.get(f"http://{address}/metrics").status_code == 200  # from this machine
