"""The limits on a client's use of the verifier: per account, per address and per process.

`docs/operating.md` has the table. An `Account` is the owner of a token; `Gate` counts raw sockets before any token is
known. uvicorn's protocols, the app, connections and the HTTP endpoints ask here.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from cloud.settings import Settings
from cloud.telemetry.metrics import Metrics
from outrider_core.serving import client_of, is_loopback

if TYPE_CHECKING:  # uvicorn is not needed if the target runs on the device itself
    from outrider_core.http_protocol import HttpProtocol

#: seconds' worth of its rate that an account may use at once
BURST = 3.0
#: bytes of a request's text that count as a token before it is tokenised, and as one frame of a device
BYTES_PER_TOKEN, BYTES_PER_FRAME = 4, 1 << 14
#: frames read from one connection per second, on average; a device sends about ten
FRAMES_PER_SECOND = 200.0
#: pings and pongs of one connection, per second on average, above which it is dropped
CONTROLS_PER_SECOND = 50.0
#: fragments of one message; the size limit does not catch empty ones
MAX_FRAGMENTS = 4096
#: time limit for a device's HELLO, in seconds
HELLO_SECONDS = 10.0
#: time limit for the headers of a request, or for a TLS handshake, in seconds
REQUEST_SECONDS = 10.0
#: time limit from a message's first byte to its last, in seconds
MESSAGE_SECONDS = 20.0
#: most WebSockets of this process; further ones get 503
MAX_CONNECTIONS = 10_000
#: seconds that a client may read nothing of a reply that is sent to it
UNREAD = 60.0
#: most sockets of one address, though half of all, if the settings name no number and other machines can connect
PER_ADDRESS = 1024
#: key of the bytes that an app's WebSocket holds, in the state of the ASGI scope
WAITING = "outrider_waiting"
#: open files of a process that the system does not limit
MANY = 1 << 20
#: descriptors for the listener, the log, the model's files and the like
RESERVED_DESCRIPTORS = 64


@dataclass(frozen=True)
class AccountLimits:
    """Limits of one account, from its line in the token file. The rates are per second.

    sessions: most open streams, and records kept. connections: most WebSockets; 0: twice `sessions`. waiting: most
    bytes of unfinished messages and bodies.
    """

    sessions: int = 32
    connections: int = 0
    waiting: int = 16 << 20
    verifies: float = 100.0  # VERIFYs; a token that the target writes alone counts as one
    prefill: float = 20_000.0  # tokens of OPENs and prompts
    nodes: float = 5_000.0  # nodes of trees


UNLIMITED = AccountLimits(1 << 31, 1 << 31, 1 << 62, float("inf"), float("inf"), float("inf"))


class Bucket:
    """A token bucket that may go into debt: any single request passes, the next one waits until the debt is paid."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate, self._clock = rate, clock
        self._level, self._at = rate * BURST, clock()

    def wait(self) -> float:
        """Return the seconds until something may be taken; 0 if it may now."""
        if self._rate == float("inf"):
            return 0.0
        now = self._clock()
        self._level = min(self._rate * BURST, self._level + (now - self._at) * self._rate)
        self._at = now
        return 0.0 if self._level > 0 else (1.0 - self._level) / self._rate

    def take(self, amount: float) -> None:
        """Use `amount`, even into debt. Raises ValueError on a negative one, as nothing is given back."""
        if amount < 0:
            raise ValueError(f"a charge of {amount}")
        self._level -= amount


class Account:
    """A client of the verifier and the resources it holds.

    streams: sessions open on all its connections, completions in preparation included. connections: its WebSockets.
    waiting: bytes of unfinished messages and bodies. expires: the last day, in UTC, on which its token is valid.
    revoked: the token file no longer has it.
    """

    def __init__(
        self,
        name: str,
        limits: AccountLimits,
        clock: Callable[[], float] = time.monotonic,
        expires: date | None = None,
    ) -> None:
        self.name, self.limits, self.expires = name, limits, expires
        self.revoked = False
        self.streams = self.connections = self.waiting = 0
        self._buckets = {kind: Bucket(getattr(limits, kind), clock) for kind in ("verifies", "prefill", "nodes")}

    @property
    def expired(self) -> bool:
        """Return whether the last day of its token is over."""
        return time.time() >= self.ends_at

    @property
    def ends_at(self) -> float:
        """Return when its token ends, in seconds since 1970; infinity without an expiry."""
        if self.expires is None:
            return float("inf")
        return datetime.combine(self.expires, datetime.max.time(), UTC).timestamp()

    @property
    def crowded(self) -> bool:
        """Return whether all its connections are in use."""
        return self.connections >= (self.limits.connections or 2 * self.limits.sessions)

    @property
    def busy(self) -> bool:
        """Return whether all its sessions are in use."""
        return self.streams >= self.limits.sessions

    @property
    def overfull(self) -> bool:
        """Return whether its unfinished messages hold too many bytes."""
        return self.waiting > self.limits.waiting

    def charge(self, **amounts: float) -> float:
        """Take amounts by kind (verifies, prefill, nodes). Returns 0, or seconds to wait if nothing was taken."""
        if wait := max(self._buckets[kind].wait() for kind in amounts):
            return wait
        self.spend(**amounts)
        return 0.0

    def spend(self, **amounts: float) -> None:
        """Take amounts that were already used, even into debt."""
        for kind, amount in amounts.items():
            self._buckets[kind].take(amount)

    def scoped(self, session: bytes) -> bytes:
        """Return the verifier's own id [16 bytes] of this account's session, so that no account can name another's."""
        return hashlib.blake2b(session, digest_size=16, key=hashlib.sha256(self.name.encode()).digest()).digest()


class RefusalReason(StrEnum):
    """Reason for refusing or cutting a handshake, request or socket; the label of `outrider:refused_total`."""

    NOT_READY = "not_ready"
    ORIGIN = "origin"
    TOKEN = "token"
    EXPIRED = "expired_token"
    CONNECTIONS = "connections"  # all of this verifier's
    ACCOUNT = "account_connections"
    SUBPROTOCOL = "subprotocol"
    SESSIONS = "sessions"
    RATE = "rate"
    TOO_LONG = "too_long"
    ADDRESS = "address_sockets"
    DESCRIPTORS = "descriptors"
    TLS = "tls_handshake"
    SLOW_REQUEST = "slow_request"
    INVALID = "invalid_request"
    SLOW_MESSAGE = "slow_message"
    WAITING = "waiting_bytes"
    UNREAD = "unread"
    FLOOD = "flood"


class Gate:
    """Counts raw sockets by address, with or without an account, and sets the deadlines of all. See SocketBounds."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.request_seconds, self.message_seconds = REQUEST_SECONDS, MESSAGE_SECONDS
        self.hello_seconds, self.unread_seconds, self.max_connections = HELLO_SECONDS, UNREAD, MAX_CONNECTIONS
        self.most_sockets = descriptors() - RESERVED_DESCRIPTORS
        usual = 0 if is_loopback(settings.host) else min(PER_ADDRESS, max(self.most_sockets // 2, 1))
        self._per_address = usual if settings.sockets_per_address is None else settings.sockets_per_address
        self._sockets: Counter[str] = Counter()
        self._total, self._metrics = 0, metrics

    def enter(self, protocol: HttpProtocol) -> bool:
        """Count a socket that has just been accepted. False: it must be cut, and was not counted.

        If there are too many, the one is cut whose client has been idle for longest and may still ask.
        """
        address = client_of(protocol.address)
        if self._total >= self.most_sockets and not _spare(protocol, None):
            self.refused(RefusalReason.DESCRIPTORS)
            return False
        if self._per_address and self._sockets[address] >= self._per_address and not _spare(protocol, address):
            self.refused(RefusalReason.ADDRESS)
            return False
        self._sockets[address] += 1
        self._total += 1
        self._metrics.sockets.set(self._total)
        return True

    def leave(self, address: str) -> None:
        """Remove a socket that is gone from the count."""
        address = client_of(address)
        self._total -= 1
        self._sockets[address] -= 1
        if not self._sockets[address]:
            del self._sockets[address]
        self._metrics.sockets.set(self._total)

    def refused(self, reason: str) -> None:
        """Count a refused or cut one."""
        self._metrics.refused.labels(reason).inc()


def _spare(protocol: HttpProtocol, address: str | None) -> bool:
    """Cut an idle kept connection, of this address or of any. False: there is none."""
    kept = [one for one in protocol.connections if isinstance(one, type(protocol)) and one.kept]
    kept = [one for one in kept if not one.transport.is_closing() and address in (None, client_of(one.address))]
    if kept:
        min(kept, key=lambda one: one.since).cut()
    return bool(kept)


def descriptors() -> int:
    """Return how many files and sockets this process may open."""
    import resource  # not available everywhere, and not needed if the target runs on the device itself

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MANY if soft == resource.RLIM_INFINITY else soft


def raise_descriptors() -> None:
    """Let this process open as many files and sockets as the system allows. Only for a process that is a verifier."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
