"""Who may use the verifier, and how much of it: a file of hashed tokens with limits, reloaded on SIGHUP.

    # name     sha256 of the token, hex      limits (all optional)
    app-1      9f86d081884c7d65...           sessions=32 connections=64 verifies=100 prefill=20000 nodes=5000

`python -m cloud.auth FILE NAME` adds a line.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from cloud.server.limits import UNLIMITED, Account, AccountLimits

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
        for digest, name, limits in read_accounts(self.path):
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


def read_accounts(path: Path) -> list[tuple[bytes, str, AccountLimits]]:
    """Return digest, name and limits of each line of a token file. Raises AuthError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AuthError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_accounts(path, data)


def parse_accounts(path: Path, data: bytes) -> list[tuple[bytes, str, AccountLimits]]:
    """Return what `read_accounts` does, of a file with these bytes. Raises AuthError."""
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise AuthError(f"{path}: cannot be read: {error}") from None
    kinds = {limit.name: limit_type(limit) for limit in fields(AccountLimits)}
    accounts: list[tuple[bytes, str, AccountLimits]] = []
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
        accounts.append((digest, words[0], AccountLimits(**given)))  # type: ignore[arg-type]
    if not accounts:
        raise AuthError(f"{path}: contains no tokens; python -m cloud.auth {path} NAME adds one")
    return accounts


def limit_type(limit: Field[Any]) -> Callable[[str], float]:
    """Return what reads a limit from text."""
    return int if isinstance(limit.default, int) else float
