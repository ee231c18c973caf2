"""What HTTP servers have in common: all addresses of a name on one port, what loopback is, which pages may ask."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cloud.scaling.driver import _check_addresses
from cloud.scaling.options import ScaleError
from cloud.settings import Settings
from outrider_core.serving import PageRules, bearer, bind, in_url, is_loopback

BOTH = ("127.0.0.1", "::1")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """localhost has both addresses, one of them twice, whatever this machine's files say."""
    resolve = socket.getaddrinfo

    def both(host: str, *arguments: Any, **options: Any) -> list[Any]:
        hosts = (*BOTH, *BOTH) if host == "localhost" else (host,)
        return [found for each in hosts for found in resolve(each, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")


@contextmanager
def bound_to(host: str, port: int = 0) -> Iterator[list[socket.socket]]:
    bound = bind(host, port)
    try:
        yield bound
    finally:
        for each in bound:
            each.close()


@pytest.mark.usefixtures("named")
def test_all_addresses_of_a_name_on_one_port() -> None:
    with bound_to("localhost") as bound:
        assert [each.getsockname()[0] for each in bound] == list(BOTH)
        (port,) = {each.getsockname()[1] for each in bound}
        for each in bound:
            each.listen()
        for host in BOTH:
            socket.create_connection((host, port), timeout=5).close()


@pytest.mark.usefixtures("named")
def test_a_port_that_one_address_has_not_free_is_an_error() -> None:
    """And nothing stays bound."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError) as refused, bound_to("localhost", port):
            pass
        assert refused.value.errno == errno.EADDRINUSE
        with pytest.raises(ScaleError, match=f"cannot listen on localhost port {port}"):
            _check_addresses(Settings(host="localhost", port=port), None)
        with socket.create_server(("127.0.0.1", port)):
            pass
    _check_addresses(Settings(host="localhost", port=port), None)


def test_an_address_that_this_machine_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def with_foreign(host: str, *arguments: Any, **options: Any) -> list[Any]:
        hosts = ("192.0.2.1", "127.0.0.1") if host == "name" else (host,)
        return [found for each in hosts for found in resolve(each, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", with_foreign)
    with bound_to("name") as bound:
        assert [each.getsockname()[0] for each in bound] == ["127.0.0.1"]
    with pytest.raises(OSError) as refused, bound_to("192.0.2.1"):
        pass
    assert refused.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("0.0.0.0", False), ("::", False),
     ("192.0.2.1", False), ("localhost.example", False), ("", False), (None, False)],
)  # fmt: skip
def test_loopback(host: str | None, expected: bool) -> None:
    assert is_loopback(host) == expected


def test_a_host_in_a_url() -> None:
    assert (in_url("::1"), in_url("127.0.0.1"), in_url("name")) == ("[::1]", "127.0.0.1", "name")


@pytest.mark.parametrize(
    ("header", "protocols", "token"),
    [("Bearer x", [], "x"), ("bearer  x ", [], "x"), ("Basic x", [], None), (None, ["bearer.y"], "y"), (None, [], None),
     ("Bearer ", ["a", "bearer.y"], "y"), ("Bearer x", ["bearer.y"], "x")],
)  # fmt: skip
def test_a_token(header: str | None, protocols: Sequence[str], token: str | None) -> None:
    assert bearer(header, protocols) == token


GOOD = "https://good.example"


@pytest.mark.parametrize(
    ("headers", "foreign", "rebound"),
    [
        ({"host": "127.0.0.1:8766"}, False, False),
        ({"host": "localhost", "origin": GOOD}, False, False),
        ({"host": "localhost", "origin": "https://evil.example"}, True, False),
        ({"host": "localhost", "origin": "http://localhost"}, False, False),
        ({"host": "evil.example", "origin": "http://evil.example"}, True, True),
        ({"host": "named.example:9", "origin": "http://named.example:9"}, False, False),
        ({"host": "evil.example"}, False, True),
        ({"host": "127.0.0.1.evil.example"}, False, True),
        ({"host": "["}, False, True),
        ({}, False, True),
    ],
)
def test_which_pages_may_ask(headers: dict[str, str], foreign: bool, rebound: bool) -> None:
    pages = PageRules([GOOD], ["named.example"], serves_pages=True)
    assert (pages.foreign(headers), pages.rebound(headers)) == (foreign, rebound)
    guarded = PageRules([GOOD], [], needs_token=True, serves_pages=True)
    assert not guarded.rebound(headers)
    origin = headers.get("origin", GOOD)
    assert guarded.foreign(headers) == (origin not in (GOOD, f"http://{headers.get('host')}"))
    without_pages = PageRules([GOOD])
    assert without_pages.foreign(headers) == (origin != GOOD)
