"""TLS to a verifier: whom to trust."""

from __future__ import annotations

import base64
import hashlib
import re
import ssl
from collections.abc import Collection
from pathlib import Path

from edge_runtime.link.events import LinkRefused

PIN = re.compile(r"sha256/[A-Za-z0-9+/]{43}=")
#: tag of the optional version that a certificate's fields may begin with
VERSION = 0xA0


def tls_context(ca_file: str | Path | None, pins: Collection[str] = ()) -> ssl.SSLContext:
    """Return a context that trusts the system's certificates and `ca_file`'s; if there are `pins`, only for those keys.

    Raises LinkRefused if `ca_file` has no certificates, and for what is not a pin.
    """
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (OSError, ssl.SSLError) as error:
            raise LinkRefused(f"{ca_file} holds no certificates: {error}") from None
    for pin in pins:
        if not PIN.fullmatch(pin):
            raise LinkRefused(f"{pin!r} is not a pin: sha256/ and 44 characters of base64")
    if pins:
        context.sslobject_class = _pinned(frozenset(pins))
    return context


def _pinned(pins: frozenset[str]) -> type[ssl.SSLObject]:
    class Pinned(ssl.SSLObject):
        """A connection that ends in its handshake, before anything is sent, if the server's key is not pinned."""

        def do_handshake(self) -> None:
            super().do_handshake()
            pin = pin_of(self.getpeercert(binary_form=True) or b"")
            if pin not in pins:
                error = ssl.SSLCertVerificationError(f"{pin} is not pinned")
                error.verify_message = f"its public key is not pinned: {pin}"
                raise error

    return Pinned


def pin_of(certificate: bytes) -> str:
    """Return `sha256/` and the base64 of the SHA-256 of a DER certificate's SubjectPublicKeyInfo (RFC 5280)."""
    fields, _ = _element(certificate, 0)
    at, _ = _element(certificate, fields)
    for _ in range(6 if certificate[at] == VERSION else 5):  # serial number, signature, issuer, validity, subject
        at = _element(certificate, at)[1]
    key = certificate[at : _element(certificate, at)[1]]
    return "sha256/" + base64.b64encode(hashlib.sha256(key).digest()).decode()


def _element(data: bytes, at: int) -> tuple[int, int]:
    """Return where the content of the DER element at `at` begins and ends."""
    size, begin = data[at + 1], at + 2
    if size & 0x80:
        begin += size & 0x7F
        size = int.from_bytes(data[at + 2 : begin], "big")
    return begin, begin + size
