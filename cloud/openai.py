"""Routes of the OpenAI API: `POST /v1/chat/completions` and `GET /v1/models`. The target decodes alone.

Each completion is a session of its own in the engine: OPEN, GENERATE, and CLOSE in every case, also when the client
hangs up. It is sampled as for a device (`outrider_core.protocol.sampling`), so a seed gives the same text here and
there. No request text is logged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
from jinja2 import TemplateError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloud.auth import Account
from cloud.completion import RETRY_SECONDS, Completion, as_api_error
from cloud.service import Verifier
from outrider_core.chat_api.asgi import ClientGone, read_body
from outrider_core.chat_api.errors import ApiError
from outrider_core.chat_api.replies import model_card, model_list
from outrider_core.chat_api.requests import check_model, parse
from outrider_core.chat_boundary import boundary_of, render_chat
from outrider_core.protocol.text import Detokeniser


def openai_routes(
    verifier: Verifier, model_name: str, tokenizer: Any, admit: Callable[[Request], Account]
) -> list[Route]:
    """Routes for the app of `verifier`, which serves its target as `model_name`.

    tokenizer: the target's own transformers tokenizer; completions are refused if it has no chat template.
    admit(request): returns the account that asks, or raises ApiError.
    """
    card = model_card(model_name)
    boundary = boundary_of(tokenizer)
    skip = frozenset(tokenizer.all_special_ids)
    # a long prompt would hold up the event loop; one thread, because tokenizers are not safe for several
    worker = ThreadPoolExecutor(1, "tokenizer")

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def encode(conversation: list[dict[str, str]]) -> list[int]:
        if not tokenizer.chat_template:
            raise ApiError(400, f"{model_name} has no chat template; serve an instruct model", "model")
        try:
            return boundary.encode(conversation, partial(render_chat, tokenizer))
        except (TemplateError, ValueError) as error:
            raise ApiError(400, f"the chat template of {model_name} refuses this: {error}", "messages") from None

    async def chat(request: Request) -> Response | Completion:
        account = admit(request)
        _check_ready(verifier)
        _check_limits(account, 0)  # do not tokenise for an account over its limits
        asked = parse(await read_body(request.receive))
        check_model(asked.model, model_name)
        ids = await asyncio.get_running_loop().run_in_executor(worker, encode, asked.conversation)
        _check_prompt(ids, verifier)
        _check_limits(account, len(ids))
        return Completion(verifier, account, model_name, asked, ids, Detokeniser(decode, skip))

    async def models(request: Request) -> Response:
        admit(request)
        return _json(model_list(card))

    async def model(request: Request) -> Response:
        admit(request)
        check_model(request.path_params["name"], model_name)
        return _json(card)

    return [
        Route("/v1/chat/completions", _answered(chat), methods=["POST"]),
        Route("/v1/models", _answered(models)),
        Route("/v1/models/{name:path}", _answered(model)),
    ]


def _answered(
    endpoint: Callable[[Request], Awaitable[Response | Completion]],
) -> Callable[[Request], Awaitable[Response | Completion]]:
    """The endpoint, with its exceptions turned into responses."""

    async def answered(request: Request) -> Response | Completion:
        try:
            return await endpoint(request)
        except ClientGone:
            return Response(status_code=400)  # nobody reads it
        except Exception as error:
            return _refusal(error)

    return answered


def _refusal(error: Exception) -> Response:
    refusal = as_api_error(error)
    return _json(refusal.body(), refusal.status, refusal.headers)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _check_ready(verifier: Verifier) -> None:
    if not verifier.ready:
        raise ApiError(
            503, "the server accepts no requests now; try again or use another", None, "not_ready", RETRY_SECONDS
        )


def _check_prompt(ids: list[int], verifier: Verifier) -> None:
    if not ids:
        raise ApiError(400, "the chat template makes an empty prompt of these messages", "messages")
    if len(ids) >= verifier.max_context:
        text = f"the prompt has {len(ids)} tokens; at most {verifier.max_context - 1} fit this server's context"
        raise ApiError(400, text, "messages", "context_length_exceeded")
    if max(ids) >= verifier.vocab_size:  # would fail the step of every session
        raise ApiError(400, f"the prompt holds token {max(ids)}, which the model does not know", "messages")


def _check_limits(account: Account, prompt: int) -> None:
    """Charge the prompt's tokens. Each token written counts as a verify, charged when it comes."""
    if account.streams >= account.limits.sessions:
        text = f"this token's {account.limits.sessions} sessions are all in use"
        raise ApiError(429, text, None, "rate_limit_exceeded", RETRY_SECONDS)
    if wait := account.charge(prefill=prompt, verifies=0):
        text = "over this token's limit of tokens per second"
        raise ApiError(429, text, None, "rate_limit_exceeded", math.ceil(wait))
