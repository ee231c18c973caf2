"""The WebSocket to the verifier: connect when needed, shake hands, receive, and reconnect.

`Link.run` is one task for the runtime's whole life. It reports events and never raises for a network reason; `send`
never waits, and drops what cannot be sent, because the session repeats every message after the next link-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import ssl
import time
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec import structs
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import CloseCode
from websockets.http11 import Response

from edge_runtime.link.address import address_of, in_clear_text, verifier_url
from edge_runtime.link.authorization import Authorization, TokenProvider
from edge_runtime.link.events import (
    Arrived,
    EngineFailed,
    LinkDown,
    LinkEvent,
    LinkRefused,
    LinkUp,
    Traffic,
    frame_bytes,
)
from edge_runtime.link.tls import tls_context
from outrider_core.protocol.wire import (
    ERR_MISMATCH,
    MAX_SERVER_FRAME,
    PROTOCOL_VERSION,
    SUBPROTOCOL,
    ClientMessage,
    Error,
    Hello,
    Welcome,
    WireError,
    decode_server,
    encode,
    other_arithmetic,
)
from outrider_core.serving import is_loopback

#: seconds to wait for each phase of a connection: TCP, TLS and WebSocket; HELLO. A time-out doubles them, up to the
#: longest; a connection sets them to this many of its round trips, but at least the first
CONNECT_TIMEOUT, LONGEST_TIMEOUT = 5.0, 20.0
ROUND_TRIPS = 8
#: delays between attempts: the first retry comes fast, because an answer is waiting
FIRST_RETRY, LAST_RETRY = 0.1, 3.0
#: the longest delay after a refusal: another version may answer at this address, perhaps after an upgrade
REFUSED_RETRY = 30.0
#: seconds, and round trips, that a silent connection has to answer a ping before another one is dialled
HEAD_START, HEAD_START_TRIPS = 0.25, 2
#: seconds until the next address is dialled in parallel, as RFC 8305 recommends
ADDRESS_DELAY = 0.25
#: calls of `renew` after which a silent connection is given up, even if it answers pings
RENEWALS = 10
#: errors of dialling; UnicodeError: the name has no form for the DNS; ImportError: a SOCKS proxy without its package
FAILURES = (OSError, TimeoutError, UnicodeError, ImportError, WebSocketException, WireError)
#: meanings of a connection's end, in words; other ends bring their own
CLOSED: dict[int, str] = {
    CloseCode.ABNORMAL_CLOSURE: "the connection was cut",
    CloseCode.NORMAL_CLOSURE: "the verifier closed the connection",
    CloseCode.SERVICE_RESTART: "the verifier is restarting",
}


class _Connect(connect):
    """Follows no redirect: a verifier sends none, and a network's login page must not get the token."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


def _what_came(answer: Response) -> tuple[str, bool]:
    """Describe an HTTP answer instead of a WebSocket in one line, and whether it is a web page, not a verifier's."""
    body = (answer.body or b"").decode(errors="replace").strip()
    page = "html" in answer.headers.get("Content-Type", "") or body.startswith("<") or "Location" in answer.headers
    if page:
        return f"a web page came in place of the verifier (HTTP {answer.status_code}); sign in to this network?", True
    return body.partition("\n")[0][:200] or f"HTTP {answer.status_code}", False


def reason_of(error: BaseException) -> str:
    """Describe a network error for people: an operating system's own words without their number."""
    if isinstance(error, ConnectionClosed):
        code, said = (error.rcvd.code, error.rcvd.reason) if error.rcvd else (CloseCode.ABNORMAL_CLOSURE, "")
        return CLOSED.get(code) or said or f"the verifier closed the connection with code {code}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the verifier's certificate is not trusted: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    return str(error) or type(error).__name__


def _abort(connection: ClientConnection) -> None:
    """Cut a connection, or do nothing if it is gone."""
    with contextlib.suppress(AttributeError):  # of asyncio, if it closed with unsent data and then could send it
        connection.transport.abort()


class Link:
    """Keeps a connection to `server` alive and hands events to `report`, in order; from the start, or as `stay` says.

    token: sent as `Authorization: Bearer`, never in clear text to another machine; or a function that returns it.
    ca_file: PEM certificates to trust beside the system's. pins: as of `RuntimeOptions`. Proxies are those of the
    environment (`HTTPS_PROXY`, `NO_PROXY`...) or of the system. Raises LinkRefused for an unusable address, token, file
    or pin.
    """

    def __init__(
        self,
        server: str,
        hello: Hello,
        report: Callable[[LinkEvent], None],
        token: str | TokenProvider | None = None,
        ca_file: str | Path | None = None,
        pins: Collection[str] = (),
    ) -> None:
        self.url, self.hello, self.report = verifier_url(server), hello, report
        parts = address_of(server)
        if token and in_clear_text(server):
            raise LinkRefused(f"{self.url} would carry the token in clear text; use wss://")
        if pins and parts.scheme == "ws":
            raise LinkRefused(f"{self.url} has no public key to be pinned; use wss://")
        self._authorization = Authorization(token)
        self._proxied = not is_loopback(parts.hostname)
        self._tls = tls_context(ca_file, pins) if parts.scheme == "wss" else None
        self.traffic = Traffic()
        self.welcome: Welcome | None = None  # while there is a connection
        self.refused: LinkRefused | EngineFailed | None = None  # always None: a refusal today may not be one tomorrow
        self._connection: ClientConnection | None = None
        self._frames, self._queued = asyncio.Queue[bytes](), 0  # frames to send on it, and their bytes
        self._writing: asyncio.Task[None] | None = None
        self._unsent = math.inf  # bytes, when it last had to speak
        self._patience = CONNECT_TIMEOUT  # for each phase of the next connection
        self._rtt = 0.0  # of the last one
        self._beside: asyncio.Task[None] | None = None  # dials another one
        self._renewals = 0  # since it last spoke
        self._wanted = asyncio.Event()  # dial at once
        self._needed = asyncio.Event()  # else nothing is dialled
        self._needed.set()
        self._end = math.inf  # end of the time given to `stay`, by the wall clock
        self._hanging_up: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None  # kept here, as the event loop does not
        self._spoke = False  # whether it has spoken since WELCOME

    async def run(self) -> None:
        """Connect, receive, reconnect; ends only by cancellation."""
        try:
            await self._run()
        finally:
            self._dial_no_more()
            self._lose("closed")

    async def _run(self) -> None:
        delay = FIRST_RETRY
        while True:
            down = None
            await self._needed.wait()
            self._wanted.clear()
            try:
                self._take(*await self._dial())
            except LinkRefused as error:
                down = LinkDown(str(error), refused=True)
            except FAILURES as error:
                down = LinkDown(reason_of(error))
            if down and self._needed.is_set():  # else nothing needs it
                self.report(down)
            else:
                self._wanted.clear()
            begun = time.monotonic()
            while self._connection:
                await self._receive(self._connection)
            if not down and (self._spoke or time.monotonic() > begun + LAST_RETRY):
                delay = FIRST_RETRY  # else a server that greets and hangs up would be dialled ten times a second
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), delay * random.uniform(0.7, 1.3))
            longest = REFUSED_RETRY if down and down.refused else LAST_RETRY
            delay = FIRST_RETRY if self._wanted.is_set() else min(longest, delay * 2)

    async def _dial(self) -> tuple[ClientConnection, Welcome, float]:
        """Return a new connection after its handshake, and the seconds between HELLO and WELCOME."""
        try:
            dialled = await self._greeted(self._patience, await self._authorization.headers())
        except TimeoutError:
            self._patience = min(2 * self._patience, LONGEST_TIMEOUT)
            raise
        except InvalidStatus as error:
            status, (text, page) = error.response.status_code, _what_came(error.response)
            if page or status not in (401, 403):
                raise OSError(text) from None
            if status == 401:
                self._authorization.refused()
            raise LinkRefused(text) from None
        self._rtt = dialled[2]
        self._patience = min(max(CONNECT_TIMEOUT, ROUND_TRIPS * self._rtt), LONGEST_TIMEOUT)
        return dialled

    async def _greeted(self, patience: float, headers: dict[str, str]) -> tuple[ClientConnection, Welcome, float]:
        """Connect and shake hands. patience: seconds for each phase. Raises TimeoutError and network errors."""
        async with asyncio.timeout(patience) as phase:
            connection = await _Connect(
                self.url,
                subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
                compression=None,
                max_size=MAX_SERVER_FRAME,
                open_timeout=None,
                close_timeout=0.5,
                ping_interval=10,
                ping_timeout=20,
                proxy=True if self._proxied else None,
                happy_eyeballs_delay=ADDRESS_DELAY,
                additional_headers=headers,
                ssl=self._tls,
            )
            try:
                phase.reschedule(asyncio.get_running_loop().time() + patience)
                asked = time.monotonic()
                await connection.send(encode(self.hello))
                answer = decode_server(await connection.recv(decode=False))
            except BaseException:
                _abort(connection)
                raise
        rtt = time.monotonic() - asked
        if isinstance(answer, Error):
            await connection.close()
            if answer.code == ERR_MISMATCH:
                raise LinkRefused(answer.text)
            raise WireError(f"the verifier refused: {answer.text}")
        if not isinstance(answer, Welcome) or answer.protocol != PROTOCOL_VERSION:
            _abort(connection)
            raise LinkRefused("the other side is not an Outrider verifier of this protocol version; update one of them")
        return connection, answer, rtt

    def _take(self, connection: ClientConnection, welcome: Welcome, rtt: float) -> None:
        """Make `connection` the link, unless nothing needs it any more."""
        if not self._needed.is_set():
            _abort(connection)
            return
        self._connection, self.welcome, self._renewals, self._spoke = connection, welcome, 0, False
        self._frames, self._queued, self._unsent = asyncio.Queue(), 0, math.inf
        self._writing = asyncio.create_task(self._write(connection))
        self.report(LinkUp(welcome, rtt))

    def _lose(self, reason: str, refused: bool = False) -> None:
        """End the connection, if there is one, without a handshake: half-open links do not answer a close."""
        if self._connection is None:
            return
        _abort(self._connection)
        self._connection = self.welcome = None
        if self._writing:
            self._writing.cancel()
        self.report(LinkDown(reason, refused))

    async def _receive(self, connection: ClientConnection) -> None:
        """Report arriving messages, until `connection` ends or another has replaced it."""
        try:
            while True:
                frame = await connection.recv(decode=False)
                if connection is not self._connection:
                    return
                self._dial_no_more()
                self._renewals, self._spoke = 0, True
                message = decode_server(frame)
                self.traffic.down += frame_bytes(len(frame), masked=False)
                self.traffic.last[type(message).__name__] = frame_bytes(len(frame), masked=False)
                self.report(Arrived(message))
        except (WebSocketException, OSError, WireError) as error:
            if connection is self._connection:
                self._dial_no_more()
                self._lose(reason_of(error))

    def _dial_no_more(self) -> None:
        """Stop dialling another connection, as this one has spoken or ended."""
        if self._beside:
            self._beside.cancel()
            self._beside = None

    def stay(self, seconds: float) -> None:
        """Dial, and stay connected for `seconds`; infinity: until the next call; 0: hang up and stop dialling.

        A connection that outlived that time while the computer slept is dialled anew.
        """
        if self._hanging_up:
            self._hanging_up.cancel()
            self._hanging_up = None
        stale, self._end = time.time() > self._end, time.time() + seconds
        if seconds <= 0:
            self._rest()
            return
        if seconds < math.inf:
            self._hanging_up = asyncio.get_running_loop().call_later(seconds, self._rest)
        if not self._needed.is_set():
            self._needed.set()
            self._wanted.set()
        elif stale:
            self.network_changed()

    def _rest(self) -> None:
        """Hang up, and forget the last error."""
        self._needed.clear()
        self._end = math.inf
        self._dial_no_more()
        if self._connection:
            connection, self._connection, self.welcome = self._connection, None, None
            if self._writing:
                self._writing.cancel()
            self._closing = asyncio.create_task(connection.close())
        self.report(LinkDown(""))

    def network_changed(self) -> None:
        """Dial at once, over the present network, if a connection is needed."""
        if self._needed.is_set():
            self._patience = CONNECT_TIMEOUT
            self._dial_no_more()
            self._lose("the network has changed")
            self._wanted.set()

    def pin(self, arithmetic: str) -> None:
        """From now on HELLO asks for verifiers with this arithmetic; "": any. A connection to another one ends.

        Without a connection, it is dialled at once: a verifier that refused before may fit now.
        """
        changed, self.hello = arithmetic != self.hello.arithmetic, structs.replace(self.hello, arithmetic=arithmetic)
        if self.welcome is None:
            if changed:
                self._wanted.set()
        elif not self.welcome.computes_in(arithmetic):
            self._dial_no_more()
            self._lose(other_arithmetic(arithmetic, self.welcome.arithmetic), refused=True)

    def renew(self) -> None:
        """Dial another connection beside a silent one, and keep the one that speaks first.

        A half-open connection never does; one that waits for a busy verifier answers a ping at once; and one through an
        outage may speak again before a new one is there. If dialling fails, the silent one is given up too. One that
        still accepts data is not silent: a long message on a slow link is on its way.
        """
        if self._connection is None:
            return
        unsent, self._unsent = self._unsent, self._queued + self._connection.transport.get_write_buffer_size()
        if 0 < self._unsent < unsent:
            return
        self._renewals += 1
        if self._renewals > RENEWALS:
            self._dial_no_more()
            self._lose("silent for too long")
        elif self._beside is None or self._beside.done():
            self._beside = asyncio.create_task(self._dial_beside(self._connection))

    async def _dial_beside(self, silent: ClientConnection) -> None:
        pong = asyncio.create_task(self._heed_pong(silent))
        try:
            await asyncio.sleep(max(HEAD_START, HEAD_START_TRIPS * self._rtt))
            dialled = await self._dial()
        except (*FAILURES, LinkRefused) as error:
            self._lose(f"silent, and dialling again failed: {reason_of(error)}")
        else:
            self._lose("silent; another connection spoke first")
            self._take(*dialled)
        finally:
            pong.cancel()

    async def _heed_pong(self, silent: ClientConnection) -> None:
        with contextlib.suppress(WebSocketException):
            await (await silent.ping())
            self._dial_no_more()

    def send(self, message: ClientMessage) -> None:
        """Send `message` after those before, if there is a connection; a failure is reported as LinkDown."""
        if self._connection is None:
            return
        frame = encode(message)
        self._frames.put_nowait(frame)
        self._queued += len(frame)
        self.traffic.up += frame_bytes(len(frame), masked=True)
        self.traffic.last[type(message).__name__] = frame_bytes(len(frame), masked=True)

    async def _write(self, connection: ClientConnection) -> None:
        """Send frames as they come, while the connection accepts them; its end is noticed when reading."""
        with contextlib.suppress(WebSocketException, OSError):
            while True:
                frame = await self._frames.get()
                self._queued -= len(frame)
                await connection.send(frame)
                self._frames.task_done()

    async def flush(self) -> None:
        """Wait until everything sent is written, or the connection has ended."""
        if self._writing and self._connection:
            written = asyncio.ensure_future(self._frames.join())
            await asyncio.wait({self._writing, written}, return_when=asyncio.FIRST_COMPLETED)
            written.cancel()

    async def ping(self) -> float:
        """Return the seconds of a WebSocket ping and its pong. Raises OSError without a connection."""
        if self._connection is None:
            raise OSError("there is no connection")
        began = time.monotonic()
        try:
            await (await self._connection.ping())
        except WebSocketException as error:
            raise OSError(str(error)) from None
        return time.monotonic() - began
