"""`python -m cloud.auth FILE NAME`: create a token for the verifier, print it once, add its hash to the token file."""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import fields
from datetime import date
from pathlib import Path

from cloud.server.accounts import AuthError, limit_type, parse_accounts
from cloud.server.limits import AccountLimits


def main(argv: Sequence[str] | None = None) -> int:
    """Create a token and add its hash to a file. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cloud.auth",
        description="Create a token for the verifier: it is printed once, its hash goes into FILE.",
        epilog="A running verifier reloads the file on SIGHUP. To revoke a token, delete its line; to extend or "
        "shorten its time, change its date.",
    )
    parser.add_argument("file", type=Path, help="token file (the verifier's --auth-file), created if missing")
    parser.add_argument("name", help="who the token is for: letters, digits, dot, dash, underscore")
    parser.add_argument(
        "--expires", type=date.fromisoformat, metavar="DATE", help="last day of the token, UTC, as 2027-06-30"
    )
    for limit in fields(AccountLimits):
        parser.add_argument(
            f"--{limit.name}", type=limit_type(limit), metavar="N", help=f"limit (default {limit.default:g})"
        )
    arguments = parser.parse_args(argv)
    limits = [f"{f.name}={v:g}" for f in fields(AccountLimits) if (v := getattr(arguments, f.name)) is not None]
    token = secrets.token_urlsafe(32)
    expires = [] if arguments.expires is None else [arguments.expires.isoformat()]
    line = " ".join([arguments.name, hashlib.sha256(token.encode()).hexdigest(), *expires, *limits])
    path: Path = arguments.file
    try:
        before = path.read_bytes() if path.exists() else b""
        addition = (b"" if before.endswith(b"\n") or not before else b"\n") + line.encode() + b"\n"
        parse_accounts(path, before + addition)  # before anything is written
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(addition)
    except OSError as error:
        print(f"auth: {path}: {error.strerror or error}", file=sys.stderr)
        return 2
    except AuthError as error:
        print(f"auth: {error}; nothing was added", file=sys.stderr)
        return 2
    print(token)
    print(
        f"auth: the token is shown this once; {path} has its hash. Clients send it as `Authorization: Bearer TOKEN` "
        "(outrider: --token or OUTRIDER_TOKEN; OpenAI's: api_key). A running verifier accepts it after SIGHUP.",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
