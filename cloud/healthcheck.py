"""`python -m cloud.healthcheck`: ask the verifier on this machine whether it is alive. For containers.

It reads the verifier's own settings (VERIFIER_*, VERIFIER_CONFIG, flags), so it knows port and TLS. The certificate is
not checked, as it names the verifier's public host. Exit status 0: alive; 1: not, with one line on stderr.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_settings import SettingsError

from cloud.settings import describe_errors, read_settings

SECONDS = 5.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Ask /healthz once. Returns the exit status."""
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv, "python -m cloud.healthcheck")
    except ValidationError as error:
        return _fail(describe_errors(error))
    except (SettingsError, OSError, ValueError) as error:
        return _fail(str(error.__cause__ or error))
    host = EVERYWHERE.get(settings.host, settings.host)
    connection: http.client.HTTPConnection
    if settings.ssl_certfile is None:
        connection = http.client.HTTPConnection(host, settings.port, timeout=SECONDS)
    else:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, settings.port, timeout=SECONDS, context=context)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        text = answer.read(1000).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return _fail(f"nothing answers at {host} port {settings.port}: {error}")
    finally:
        connection.close()
    return 0 if answer.status == 200 else _fail(text)


def _fail(text: str) -> int:
    print(f"healthcheck: {' '.join(text.split())}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
