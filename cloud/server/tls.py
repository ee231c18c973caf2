"""The verifier's certificate: read at start, and again on SIGHUP."""

from __future__ import annotations

import ssl

from cloud.settings import Settings


class CertificateError(RuntimeError):
    """The certificate or its key cannot be used. One line that says why."""


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the context for --ssl-certfile and --ssl-keyfile, or None without them. Raises CertificateError."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, settings)
    return context


def _load(context: ssl.SSLContext, settings: Settings) -> None:
    assert settings.ssl_certfile is not None and settings.ssl_keyfile is not None
    try:
        for path in (settings.ssl_certfile, settings.ssl_keyfile):
            path.open("rb").close()  # a clear error where ssl gives none
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except ssl.SSLError as error:
        pair = f"--ssl-certfile {settings.ssl_certfile}, --ssl-keyfile {settings.ssl_keyfile}"
        raise CertificateError(f"{pair}: not a certificate and its key in PEM ({error.reason or error})") from None
    except OSError as error:
        raise CertificateError(f"cannot read {error.filename}: {error.strerror or error}") from None


def reload_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """Let new connections see the certificate that the files hold now. Raises CertificateError and changes nothing."""
    tls_context(settings)  # tried on another context first: a half-read pair would stay
    _load(context, settings)
