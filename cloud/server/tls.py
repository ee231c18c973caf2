"""The verifier's certificate: read at start, and again on SIGHUP."""

from __future__ import annotations

import ssl
from _ssl import _test_decode_cert  # type: ignore[attr-defined]  # nothing public reads the expiry in a file
from pathlib import Path

from cloud.settings import Settings


class CertificateError(RuntimeError):
    """The certificate or its key cannot be used. One line with the reason."""


class Certificate:
    """A certificate and its key in files. Raises CertificateError if they cannot be used.

    context: presents the certificate that was read last to new connections. expires: its end, in seconds since 1970.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain, self._key = chain, key
        self._shown: tuple[bytes, ...] = ()
        self.context, self.expires = _new_context(), 0.0
        self.reload()

    @classmethod
    def of(cls, settings: Settings) -> Certificate | None:
        """Return the certificate of --ssl-certfile and --ssl-keyfile, None without them. Raises CertificateError."""
        if settings.ssl_certfile is None or settings.ssl_keyfile is None:
            return None
        return cls(settings.ssl_certfile, settings.ssl_keyfile)

    def reload(self) -> bool:
        """Read the files again. Returns whether they have changed. Raises CertificateError and changes nothing."""
        try:
            read = tuple(path.read_bytes() for path in (self._chain, self._key))  # a clearer error than ssl's
            if read == self._shown:
                return False
            for context in (_new_context(), self.context):  # tried on another first: a half-read pair would stay
                context.load_cert_chain(self._chain, self._key)
            self.expires = ssl.cert_time_to_seconds(str(_test_decode_cert(str(self._chain))["notAfter"]))
        except ssl.SSLError as error:
            pair = f"--ssl-certfile {self._chain}, --ssl-keyfile {self._key}"
            raise CertificateError(f"{pair}: not a certificate and its key in PEM ({error.reason or error})") from None
        except OSError as error:
            raise CertificateError(f"cannot read {error.filename}: {error.strerror or error}") from None
        self._shown = read
        return True


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
