"""Rules that all HTTP servers share: all addresses of a name on one port, loopback, and allowed web pages."""

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
from outrider_core.serving import PageRules, bearer, bind, client_of, in_url, is_loopback

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
        for host in BOTH:
            socket.create_connection((host, port), timeout=5).close()


def test_the_second_program_on_a_port_learns_it_at_once() -> None:
    """Not once it listens: by then both have loaded a large model."""
    with bound_to("127.0.0.1") as bound:
        port = bound[0].getsockname()[1]
        with pytest.raises(OSError) as refused, bound_to("127.0.0.1", port):
            pass
        assert refused.value.errno == errno.EADDRINUSE
    with bound_to("127.0.0.1", port):  # at once behind the first, whose connections the system still remembers
        pass


@pytest.mark.parametrize("hosts", [("::", "0.0.0.0"), ("0.0.0.0", "::"), ("::",)])
def test_a_name_of_both_kinds_has_a_socket_for_each(hosts: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one for both, where the name has an address of IPv6 alone."""
    resolve = socket.getaddrinfo

    def named(host: str, *arguments: Any, **options: Any) -> list[Any]:
        found = hosts if host == "name" else (host,)
        return [each for one in found for each in resolve(one, *arguments, **options)]

    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "getaddrinfo", named)
    with bound_to("name") as bound:
        families = [each.family for each in bound]
        assert len(bound) == len(hosts) and families.count(socket.AF_INET6) == 1
        six = bound[families.index(socket.AF_INET6)]
        assert six.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == (len(hosts) > 1)
        port = six.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), timeout=5):
                listener = six if host == "::1" or len(hosts) == 1 else bound[families.index(socket.AF_INET)]
                accepted, address = listener.accept()
                accepted.close()
                assert is_loopback(address[0])
                assert client_of(address[0]) == (host if host == "127.0.0.1" else "::/64")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff", True), ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
     ("::ffff:192.0.2.7", "192.0.2.7", True), ("::ffff:192.0.2.7", "::ffff:192.0.2.8", False),
     ("192.0.2.7", "192.0.2.8", False), ("fe80::1%eth0", "fe80::2%eth0", True), ("::1", "2001:db8::1", False),
     ("64:ff9b::192.0.2.7", "192.0.2.7", True), ("64:ff9b::192.0.2.7", "64:ff9b::192.0.2.8", False),
     ("", "", True), ("unix", "unix", True)],
)  # fmt: skip
def test_a_client_has_a_network_of_addresses(one: str, other: str, same: bool) -> None:
    assert (client_of(one) == client_of(other)) == same


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
    [("::ffff:127.0.0.1", True), ("::ffff:192.0.2.1", False), ("localhost", True), ("127.0.0.1", True),
     ("127.0.0.2", True), ("::1", True), ("0.0.0.0", False), ("::", False),
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
