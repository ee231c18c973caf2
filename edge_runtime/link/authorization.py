"""The token that a link sends with its handshake."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

#: returns a bearer token: before the first dial, and again after HTTP 401, as it may have expired
TokenProvider = Callable[[], Awaitable[str]]


class Authorization:
    """A fixed token, one that a provider gives, or none."""

    def __init__(self, token: str | TokenProvider | None) -> None:
        self._provider = token if callable(token) else None
        self._token = None if callable(token) else token  # None: the provider is to be asked

    async def headers(self) -> dict[str, str]:
        """Return those of the handshake. Raises OSError if a token is needed and there is none."""
        if self._provider and not self._token:
            try:
                self._token = await self._provider()
            except Exception as error:
                raise OSError(f"no token: {error}") from error
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def refused(self) -> None:
        """The verifier answered 401: the token may have expired."""
        if self._provider:
            self._token = None
