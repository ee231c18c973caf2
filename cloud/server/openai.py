"""Routes of the OpenAI API: chat and text completions, responses, and `GET /v1/models`. The target decodes alone.

Each choice is a session of its own in the engine: OPEN, GENERATE, and CLOSE in every case, also when the client
hangs up. It is sampled as for a device (`outrider_core.protocol.sampling`), so a seed gives the same text here and
there. No request text is logged.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from cloud.server.completion import RETRY_SECONDS, Completion, as_api_error
from cloud.server.limits import BYTES_PER_TOKEN, Account, Gate, Refusal
from cloud.server.service import Verifier
from cloud.server.tokenizing import FairWorker
from outrider_core.chat.api.asgi import ClientGone, read_body
from outrider_core.chat.api.constraints import field_of
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import Request, check_model
from outrider_core.chat.api.replies import model_card, model_list
from outrider_core.chat.api.routes import PARSERS
from outrider_core.chat.grammar import GrammarError
from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.protocol.constraint import Rules


def openai_routes(
    verifier: Verifier, model_name: str, tokenizer: ChatTokenizer, admit: Callable[[HttpRequest], Account], gate: Gate
) -> list[Route]:
    """Routes for the app of `verifier`, which serves its target as `model_name`.

    tokenizer: the target's own; completions are refused if it has no chat template.
    admit(request): returns the account that asks, or raises ApiError. gate: counts what is refused.
    """
    card = model_card(model_name)
    worker = FairWorker("tokenizer")  # a long prompt would hold up the event loop

    def encode(asked: Request) -> list[int]:
        if asked.conversation is None:
            return (
                asked.plain_prompt
                if isinstance(asked.plain_prompt, list)
                else tokenizer.encode_prompt(asked.plain_prompt)
            )
        if not tokenizer.template:
            raise ApiError(400, f"{model_name} has no chat template; serve an instruct model", "model")
        try:
            return tokenizer.encode_chat(asked.conversation, asked.tool_use.prompt if asked.tool_use else ())
        except (TemplateError, ValueError, RecursionError) as error:
            raise ApiError(400, f"the chat template of {model_name} refuses this: {error}", "messages") from None

    async def answer(parsed: Callable[[bytes], Request], request: HttpRequest) -> Response | Completion:
        begun = time.perf_counter()
        account = admit(request)
        _check_ready(verifier)
        if account.busy:
            gate.refused(Refusal.SESSIONS)
            text = f"this token's {account.limits.sessions} sessions are all in use"
            raise ApiError(429, text, None, "rate_limit_exceeded", RETRY_SECONDS)
        account.streams += 1  # from here on, so that what waits to be read and tokenised is bounded too
        try:
            asked, ids, rules = await prepare(parsed, request, account)
        except BaseException:
            account.streams -= 1
            raise
        return Completion(verifier, account, model_name, asked, ids, rules, tokenizer, begun)

    async def prepare(
        parsed: Callable[[bytes], Request], request: HttpRequest, account: Account
    ) -> tuple[Request, list[int], list[Rules | None]]:
        """The request, its prompt and each choice's rules. Every choice reads the prompt anew, and is charged for it.

        Charged by its bytes before it is tokenised, however that ends.
        """
        charge(account, 0)  # read and tokenise nothing for an account over its limits
        body = await read_body(request.receive)
        asked = parsed(body)
        check_model(asked.model, model_name)
        paid = len(body) // BYTES_PER_TOKEN
        charge(account, paid)
        with asked.named():
            ids = await worker.run(account.name, partial(encode, asked))
            try:
                _check_prompt(ids, verifier)
            except ApiError:
                gate.refused(Refusal.TOO_LONG)
                raise
            account.spend(prefill=len(ids) * asked.choices - paid)
            return asked, ids, [await _rules(verifier, account, asked, ids) for _ in range(asked.choices)]

    def charge(account: Account, prompt: int) -> None:
        """Charge a prompt's tokens. Each token written counts as a verify, charged when it comes."""
        if wait := account.charge(prefill=prompt, verifies=0):
            gate.refused(Refusal.RATE)
            text = "over this token's limit of tokens per second"
            raise ApiError(429, text, None, "rate_limit_exceeded", math.ceil(wait))

    async def models(request: HttpRequest) -> Response:
        admit(request)
        return _json(model_list(card))

    async def model(request: HttpRequest) -> Response:
        admit(request)
        check_model(request.path_params["name"], model_name)
        return _json(card)

    return [
        *(Route(path, _answered(partial(answer, parsed)), methods=["POST"]) for path, parsed in PARSERS.items()),
        Route("/v1/models", _answered(models)),
        Route("/v1/models/{name:path}", _answered(model)),
    ]


async def no_such_route(request: HTTPConnection, error: Exception) -> Response:
    """The answer to a path or method that is not served."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = f"{request.scope.get('method', 'GET')} {request.url.path} is not served here; "
    text += f"there are POST {', '.join(PARSERS)} and GET /v1/models"
    return _refusal(ApiError(status, text, code="method_not_allowed" if status == 405 else "unknown_url"))


def _answered(
    endpoint: Callable[[HttpRequest], Awaitable[Response | Completion]],
) -> Callable[[HttpRequest], Awaitable[Response | Completion]]:
    """The endpoint, with its exceptions turned into responses."""

    async def answered(request: HttpRequest) -> Response | Completion:
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


async def _rules(verifier: Verifier, account: Account, asked: Request, ids: list[int]) -> Rules | None:
    """Rules of the answer behind `ids`; None where it has none. Raises ApiError on those that cannot be obeyed."""
    constraint = asked.constraint(len(ids), verifier.vocab_size)
    if constraint is None:
        return None
    field = field_of(constraint)
    if why := verifier.constraints.check(constraint, len(ids)):
        raise ApiError(400, why, field, "unsupported_parameter")
    try:
        return await asyncio.wrap_future(verifier.constraints.prepare(account.name, constraint, ids, lambda: False))
    except GrammarError as error:
        raise ApiError(400, str(error), field, "invalid_schema") from None


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
