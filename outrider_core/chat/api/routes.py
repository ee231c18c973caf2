"""Which calls there are, by their paths."""

from __future__ import annotations

from collections.abc import Callable

from outrider_core.chat.api.completions import parse_completion
from outrider_core.chat.api.fields import Request
from outrider_core.chat.api.requests import parse
from outrider_core.chat.api.responses import parse_response

#: path -> reads a body; raises ApiError
PARSERS: dict[str, Callable[[bytes], Request]] = {
    "/v1/chat/completions": parse,
    "/v1/completions": parse_completion,
    "/v1/responses": parse_response,
}
