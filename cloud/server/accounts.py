"""The accounts that may use the verifier, with their limits: a file of hashed tokens, reloaded on SIGHUP.

    # name     sha256 of the token, hex      last day (optional, UTC)   limits (all optional)
    app-1      9f86d081884c7d65...           2027-06-30                 sessions=32 connections=64 verifies=100

`python -m cloud.auth FILE NAME` adds a line.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from cloud.server.limits import UNLIMITED, Account, AccountLimits

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class AuthError(RuntimeError):
    """The token file cannot be used; one line with the place and the reason."""


class TokenLine(NamedTuple):
    """A line of the token file. expires: the last day, in UTC, on which the token is valid."""

    digest: bytes
    name: str
    expires: date | None
    limits: AccountLimits


@dataclass
class Accounts:
    """All accounts by token digest. Without a file there is a single account for everyone, without limits."""

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
        """Return whether a token is required."""
        return self.path is not None

    def authenticate(self, token: str | None) -> Account | None:
        """Return the token's account, expired or not, or None. Takes the same time in all of these cases."""
        if not self.required:
            return self._everybody
        digest = hashlib.sha256((token or "").encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, account in self._by_digest.items():
            if hmac.compare_digest(known, digest):
                found = account
        return found

    @property
    def stale(self) -> bool:
        """Return whether the file has changed since it was last read, successfully or not."""
        return self.path is not None and _version(self.path) != self._seen

    def reload(self) -> tuple[int, int]:
        """Read the file again, and return how many tokens are new and how many were revoked.

        Accounts of the same name and limits keep their debts and connections, even if the expiry changed; removed and
        changed ones are revoked. Raises AuthError and changes nothing if the file cannot be used.
        """
        assert self.path is not None
        self._seen = _version(self.path)
        fresh = dict[bytes, Account]()
        for line in _read(self.path):
            account = self._by_digest.get(line.digest)
            if account is None or (account.name, account.limits) != (line.name, line.limits):
                account = Account(line.name, line.limits, self.clock)
            account.expires = line.expires
            fresh[line.digest] = account
        for digest, account in self._by_digest.items():
            account.revoked = fresh.get(digest) is not account
        revoked = sum(account.revoked for account in self)
        new = len(fresh) - (len(self) - revoked)
        self._by_digest = fresh
        return new, revoked


def _version(path: Path) -> tuple[int, int] | None:
    """Return values that change when the file does."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _read(path: Path) -> list[TokenLine]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AuthError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_accounts(path, data)


def parse_accounts(path: Path, data: bytes) -> list[TokenLine]:
    """Return the lines of a token file with these bytes. Raises AuthError."""
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise AuthError(f"{path}: cannot be read: {error}") from None
    kinds = {limit.name: limit_type(limit) for limit in fields(AccountLimits)}
    accounts: list[TokenLine] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path} line {number}"
        if len(words) < 2 or not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1].lower()):
            raise AuthError(f"{where}: needs a name and the token's sha256 in hex, as python -m cloud.auth writes them")
        given = dict[str, float]()
        expires: date | None = None
        if len(words) > 2 and words[2][0].isdigit():
            try:
                expires = date.fromisoformat(words.pop(2))
            except ValueError as error:
                raise AuthError(f"{where}: not a date such as 2027-06-30: {error}") from None
        for word in words[2:]:
            key, _, value = word.partition("=")
            try:
                given[key] = kinds[key](value)
            except (KeyError, ValueError):
                raise AuthError(f"{where}: {word!r} is not a limit; give {', '.join(kinds)} as key=number") from None
            if not given[key] > 0:
                raise AuthError(f"{where}: {key} must be above 0")
        digest = bytes.fromhex(words[1])
        if any(digest == known.digest or words[0] == known.name for known in accounts):
            raise AuthError(f"{where}: the name or the token is in the file twice")
        accounts.append(TokenLine(digest, words[0], expires, AccountLimits(**given)))  # type: ignore[arg-type]
    if not accounts:
        raise AuthError(f"{path}: contains no tokens; python -m cloud.auth {path} NAME adds one")
    return accounts


def limit_type(limit: Field[Any]) -> Callable[[str], float]:
    """Return the parser of a limit."""
    return int if isinstance(limit.default, int) else float
