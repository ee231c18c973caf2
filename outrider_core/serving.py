"""Code that all HTTP servers here share: listening, loopback, and the rules for web pages."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

#: most connections that wait to be accepted; the system may allow fewer
BACKLOG = 2048


def is_loopback(host: str | None) -> bool:
    """Return whether a host, by name or address, can be reached from this machine only."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


#: prefix under which an IPv6-only network shows IPv4 addresses
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def client_of(host: str) -> str:
    """Return the address that identifies a client: of IPv6 its /64, which is what a home or a machine gets.

    An IPv4 address that came through an IPv6 socket, or through a NAT64 (RFC 6052), is that address.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address in NAT64:
        return str(ipaddress.IPv4Address(address.packed[12:]))
    return f"{ipaddress.IPv6Address(address.packed[:8] + bytes(8))}/64"


def in_url(host: str) -> str:
    """Return a host as in URLs: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def bind(host: str, port: int) -> list[socket.socket]:
    """Listen on all addresses of `host` that this machine has, on one port; 0 takes a free one.

    A second program on that port fails once this returns; two programs that are bound but do not listen yet may share
    it. Connections wait until they are accepted. Raises OSError.
    """
    bound, missing = list[socket.socket](), OSError(errno.EADDRNOTAVAIL, "no such address")
    try:
        found = [
            (family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ]
        both = len({family for family, _ in found}) > 1
        for family, address in dict.fromkeys(found):
            try:
                bound.append(_bound(family, (address[0], port, *address[2:]), both))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
                continue
            port = bound[-1].getsockname()[1]
        if not bound:
            raise missing
    except OSError:
        for each in bound:
            each.close()
        raise
    return bound


def _bound(family: int, address: tuple[Any, ...], both: bool) -> socket.socket:
    """both: the name has IPv4 addresses too, which have sockets of their own."""
    made = socket.socket(family)
    try:
        if os.name == "posix":  # elsewhere it would let two programs share a port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # else it accepts IPv4 connections too, depending on the system's default
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(both))
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def bearer(authorization: str | None, subprotocols: Sequence[str] = ()) -> str | None:
    """Return the token of an `Authorization: Bearer` header, or of a `bearer.TOKEN` subprotocol.

    Browsers set no headers for a WebSocket, but can set subprotocols.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and (token := token.strip(" \t")):
        return token
    return next((name.removeprefix("bearer.") for name in subprotocols if name.startswith("bearer.")), None)


class PageRules:
    """Decides which web pages may use a server, by the headers of their requests. Browsers let any page connect.

    Args:
        origins: Allowed pages, beside those of the server itself.
        names: Hosts under which pages may reach the server, beside localhost and IP addresses.
        needs_token: Every request needs a token; a stranger's page has none, so any host will do.
        serves_pages: The server has pages of its own, which may use it.
    """

    def __init__(
        self,
        origins: Collection[str],
        names: Collection[str] = (),
        needs_token: bool = False,
        serves_pages: bool = False,
    ) -> None:
        self._origins, self._names, self._needs_token = frozenset(origins), frozenset(names), needs_token
        self._serves_pages = serves_pages

    def foreign(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request comes from a page of an origin that is not allowed."""
        origin = headers.get("origin")
        if origin is None or origin in self._origins:
            return False
        own = self._serves_pages and origin.partition("://")[2] == headers.get("host")
        return not own or self.rebound(headers)

    def rebound(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request's Host may be a stranger's name that points to this machine."""
        if self._needs_token:
            return False
        try:
            name = urlsplit("//" + headers.get("host", "")).hostname or ""
            if name == "localhost" or name in self._names:
                return False
            ipaddress.ip_address(name)
        except ValueError:
            return True
        return False
