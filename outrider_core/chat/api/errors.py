"""Errors in the shape of the OpenAI API."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class ErrorFields(Struct):
    """message: for people. type: kind of error. param: the field at fault. code: a stable name for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """The JSON body of an error."""

    error: ErrorFields


class ApiError(Exception):
    """A reply other than success.

    status: of HTTP. message: for people. param: the field at fault. code: a stable name for programs. retry_after:
    seconds after which the client may try again; 0: not stated.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {"retry-after": str(retry_after)} if retry_after else {}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def body(self) -> dict[str, Any]:
        """The error as a JSON object in OpenAI's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        body: dict[str, Any] = msgspec.to_builtins(ErrorBody(ErrorFields(self.message, kind, self.param, self.code)))
        return body
