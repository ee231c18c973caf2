"""Addresses of verifiers, and the proxies on the way there."""

from __future__ import annotations

import urllib.request
from urllib.parse import SplitResult, urlsplit

from edge_runtime.link.events import LinkRefused
from outrider_core.serving import is_loopback

PATH = "/v1/verify"


def verifier_url(server: str) -> str:
    """Return the WebSocket URL of a verifier at `host:port`, `ws://host:port` or `wss://...`."""
    url = server if "://" in server else f"ws://{server}"
    url = url.replace("http://", "ws://", 1).replace("https://", "wss://", 1).rstrip("/")
    return url if url.endswith(PATH) else url + PATH


def address_of(server: str) -> SplitResult:
    """Return the parts of `verifier_url(server)`. Raises LinkRefused for an address that cannot be dialled."""
    url = verifier_url(server)
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("ws", "wss") and parts.hostname and parts.port != 0
        if not known or any(character.isspace() for character in url):
            raise ValueError
        parts.hostname.encode("idna")  # type: ignore[union-attr]
    except ValueError:
        raise LinkRefused(
            f"{server!r} is not an address; write host:port, ws://host:port or wss://host, with ports up to 65535 and "
            "IPv6 addresses in brackets"
        ) from None
    return parts


def in_clear_text(server: str) -> bool:
    """Return whether others can read conversations with `server`. Raises LinkRefused if it is not an address."""
    parts = address_of(server)
    return parts.scheme == "ws" and not is_loopback(parts.hostname)


def proxy_of(server: str) -> str | None:
    """Return the proxy that environment or system names for `server`, or None; for people. Raises LinkRefused."""
    parts = address_of(server)
    if is_loopback(parts.hostname) or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    schemes = ("wss", "socks", "https") if parts.scheme == "wss" else ("ws", "socks", "https", "http")
    proxies = urllib.request.getproxies()
    return next((proxies[scheme] for scheme in schemes if scheme in proxies), None)
