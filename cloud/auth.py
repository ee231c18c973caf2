"""Who may use the verifier, and how much of it: a file of hashed tokens with limits, reloaded on SIGHUP.

    # name     sha256 of the token, hex      limits (all optional)
    app-1      9f86d081884c7d65...           sessions=32 connections=64 verifies=100 prefill=20000 nodes=5000

`python -m cloud.auth FILE NAME` creates a token, prints it once and adds its line.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from cloud.server.limits import UNLIMITED, Account, Limits

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class AuthError(RuntimeError):
    """The token file cannot be used; one line that says where and why."""


@dataclass
class Accounts:
    """All accounts by token digest. Without a file there is a single account for everybody, without limits."""

    path: Path | None = None
    clock: Callable[[], float] = time.monotonic
    _by_digest: dict[bytes, Account] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._everybody = Account("", UNLIMITED, self.clock)
        self._seen: tuple[int, int] | None = None
        if self.path is not None:
            self.reload()

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._by_digest.values())

    @property
    def required(self) -> bool:
        """Whether a token is required."""
        return self.path is not None

    def authenticate(self, token: str | None) -> Account | None:
        """The token's account, or None. Takes the same time whichever account it is, or if there is none."""
        if not self.required:
            return self._everybody
        digest = hashlib.sha256((token or "").encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, account in self._by_digest.items():
            if hmac.compare_digest(known, digest):
                found = account
        return found

    def reload(self) -> None:
        """Read the file again. Unchanged accounts keep their debts; removed and changed ones are revoked.

        Raises AuthError and changes nothing if the file cannot be used.
        """
        assert self.path is not None
        self._seen = _version(self.path)
        fresh = dict[bytes, Account]()
        for digest, name, limits in _read(self.path):
            old = self._by_digest.get(digest)
            same = old is not None and (old.name, old.limits) == (name, limits)
            fresh[digest] = old if same and old is not None else Account(name, limits, self.clock)
        for digest, account in self._by_digest.items():
            account.revoked = fresh.get(digest) is not account
        self._by_digest = fresh

    def reload_if_changed(self) -> bool:
        """Read the file again if it is another than when it was last read; whether it was. Raises AuthError, once."""
        if self.path is None or _version(self.path) == self._seen:
            return False
        self.reload()
        return True


def _version(path: Path) -> tuple[int, int] | None:
    """Tells whether a file has changed."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _read(path: Path) -> list[tuple[bytes, str, Limits]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AuthError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    kinds = {limit.name: _number(limit) for limit in fields(Limits)}
    accounts: list[tuple[bytes, str, Limits]] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path} line {number}"
        if len(words) < 2 or not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1].lower()):
            raise AuthError(f"{where}: needs a name and the token's sha256 in hex, as python -m cloud.auth writes them")
        given = dict[str, float]()
        for word in words[2:]:
            key, _, value = word.partition("=")
            try:
                given[key] = kinds[key](value)
            except (KeyError, ValueError):
                raise AuthError(f"{where}: {word!r} is not a limit; give {', '.join(kinds)} as key=number") from None
            if not given[key] > 0:
                raise AuthError(f"{where}: {key} must be above 0")
        digest = bytes.fromhex(words[1])
        if any(digest == known or words[0] == name for known, name, _ in accounts):
            raise AuthError(f"{where}: the name or the token is in the file twice")
        accounts.append((digest, words[0], Limits(**given)))  # type: ignore[arg-type]
    if not accounts:
        raise AuthError(f"{path}: contains no tokens; python -m cloud.auth {path} NAME adds one")
    return accounts


def _number(limit: Field[Any]) -> Callable[[str], float]:
    return int if isinstance(limit.default, int) else float


def bearer(authorization: str | None, subprotocols: Sequence[str] = ()) -> str | None:
    """The token of an `Authorization: Bearer` header, or of a `bearer.TOKEN` subprotocol (browsers set no headers)."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return next((name.removeprefix("bearer.") for name in subprotocols if name.startswith("bearer.")), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Create a token and add its hash to a file. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cloud.auth",
        description="Create a token for the verifier: it is printed once, its hash goes into FILE.",
        epilog="A running verifier reloads the file on SIGHUP. To revoke a token, delete its line.",
    )
    parser.add_argument("file", type=Path, help="token file (the verifier's --auth-file), created if missing")
    parser.add_argument("name", help="who the token is for: letters, digits, dot, dash, underscore")
    for limit in fields(Limits):
        parser.add_argument(
            f"--{limit.name}", type=_number(limit), metavar="N", help=f"limit (default {limit.default:g})"
        )
    arguments = parser.parse_args(argv)
    limits = [f"{f.name}={v:g}" for f in fields(Limits) if (v := getattr(arguments, f.name)) is not None]
    token = secrets.token_urlsafe(32)
    line = " ".join([arguments.name, hashlib.sha256(token.encode()).hexdigest(), *limits])
    path: Path = arguments.file
    try:
        before = path.read_bytes() if path.exists() else b""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write((b"" if before.endswith(b"\n") or not before else b"\n") + line.encode() + b"\n")
    except OSError as error:
        print(f"auth: {path}: {error.strerror or error}", file=sys.stderr)
        return 2
    try:
        _read(path)
    except AuthError as error:
        path.write_bytes(before)
        print(f"auth: {error}; nothing was added", file=sys.stderr)
        return 2
    print(token)
    return 0


if __name__ == "__main__":
    sys.exit(main())
