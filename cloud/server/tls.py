"""The verifier's certificate: read at start, and again on SIGHUP."""

from __future__ import annotations

import ssl

from cloud.settings import Settings


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The context for --tls-cert and --tls-key, or None without them. Raises OSError or ssl.SSLError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    for path in (settings.tls_cert, settings.tls_key):
        path.open("rb").close()  # a clear error where ssl gives none
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


def reload_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """Let new connections see the certificate that the files hold now.

    Raises OSError or ssl.SSLError and changes nothing where they do not belong together or cannot be read.
    """
    assert settings.tls_cert is not None
    tls_context(settings)  # tried on another context first: a half-read pair would stay
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
