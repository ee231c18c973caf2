"""Pinned public keys: a server with another key is sent nothing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request

from edge_runtime.link.events import LinkDown, LinkEvent, LinkRefused, LinkUp
from edge_runtime.link.tls import pin_of
from edge_runtime.link.websocket import Link
from outrider_core.protocol.wire import SUBPROTOCOL
from tests.edge_runtime.test_silent_link import HELLO, Greeter
from tests.waiting import HANG

OTHER = "sha256/" + base64.b64encode(bytes(32)).decode()


def key_of(certificate: trustme.LeafCert) -> str:
    """The pin of its public key, as the library that made it says."""
    key = x509.load_pem_x509_certificate(certificate.cert_chain_pems[0].bytes()).public_key()
    digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    return "sha256/" + base64.b64encode(digest).decode()


@pytest.mark.parametrize("kind", list(trustme.KeyType))
def test_a_pin_is_of_the_public_key(kind: trustme.KeyType) -> None:
    certificate = trustme.CA().issue_cert("a.example", "long." * 30 + "example", key_type=kind)
    assert pin_of(ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())) == key_of(certificate)


@pytest.mark.parametrize("pinned", [True, False])
def test_only_pinned_keys_are_spoken_to(pinned: bool, tmp_path: Path) -> None:
    authority, tls, requests = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list[Request]()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("localhost")
    certificate.configure_cert(tls)
    pins = [OTHER, key_of(certificate)] if pinned else [OTHER]

    def note(connection: ServerConnection, request: Request) -> None:
        requests.append(request)

    async def test() -> None:
        events, greeter = asyncio.Queue[LinkEvent](), Greeter()
        async with serve(
            greeter.serve, "localhost", 0, ssl=tls, subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
            process_request=note,
        ) as server:  # fmt: skip
            address = f"wss://localhost:{server.sockets[0].getsockname()[1]}"
            link = Link(address, HELLO, events.put_nowait, "token", tmp_path / "ca.pem", pins)
            running = asyncio.create_task(link.run())
            event = await asyncio.wait_for(events.get(), HANG)
            running.cancel()
        if pinned:
            assert isinstance(event, LinkUp) and len(requests) == 1
        else:
            key = key_of(certificate)
            reason = f"the verifier's certificate is not trusted: its public key is not pinned: {key}"
            assert event == LinkDown(reason) and not requests

    asyncio.run(test())


@pytest.mark.parametrize(("server", "pin"), [("wss://host", "sha1/AAAA"), ("ws://localhost", OTHER)])
def test_what_cannot_be_pinned_is_refused(server: str, pin: str) -> None:
    with pytest.raises(LinkRefused, match="pin"):
        Link(server, HELLO, lambda event: None, pins=[pin])
