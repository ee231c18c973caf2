"""The OpenAI API on the verifier's engine: the target decodes alone.

Each choice is its own session in the engine: OPEN, GENERATE, and always CLOSE, also when the client hangs up. It is
sampled as for a device (`outrider_core.protocol.sampling`), so a seed gives the same text here and there. No request
text is logged.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from jinja2 import TemplateError
from starlette.requests import HTTPConnection

from cloud.engine.acceptance import Chances
from cloud.engine.fair_worker import FairWorker
from cloud.server.completion import RETRY_SECONDS, CompletionRecord, EngineSession
from cloud.server.limits import BYTES_PER_TOKEN, Account, Gate, RefusalReason
from cloud.server.service import Verifier
from cloud.telemetry import log
from cloud.telemetry.metrics import ERROR
from outrider_core.chat.api.constraints import field_of
from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.fields import ApiRequest, token_limit
from outrider_core.chat.api.replies import Delta, Ending, ReplyWriter, TokenChance, TokenChances
from outrider_core.chat.grammar import GrammarError
from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.protocol.constraint import Constraint, Rules
from outrider_core.protocol.ending import FinishReason
from outrider_core.protocol.text import Detokeniser, StopStrings
from outrider_core.tracing import trace_of


class EngineBackend:
    """Answers requests with `verifier` under the name `model`. See Backend.

    Args:
        tokenizer: The target's own; chat completions are refused if it has no template.
        admit: Returns the requesting account, or raises ApiError.
        gate: Counts refusals.
    """

    def __init__(
        self,
        verifier: Verifier,
        model: str,
        tokenizer: ChatTokenizer,
        admit: Callable[[HTTPConnection], Account],
        gate: Gate,
    ) -> None:
        self.aliases: Sequence[str] = ()
        self.verifier, self.model, self.tokenizer, self.admit, self.gate = verifier, model, tokenizer, admit, gate
        self._worker = FairWorker("tokenizer")  # a long prompt would block the event loop

    def begin(self, request: HTTPConnection) -> EngineCompletion:
        """See Backend."""
        account = self.admit(request)
        if not self.verifier.ready:
            text = "the server accepts no requests now; try again or use another"
            raise ApiError(503, text, None, "not_ready", RETRY_SECONDS)
        if account.busy:
            self.gate.refused(RefusalReason.SESSIONS)
            text = f"this token's {account.limits.sessions} sessions are all in use"
            raise ApiError(429, text, None, "rate_limit_exceeded", RETRY_SECONDS)
        self.charge(account, 0)  # read and tokenise nothing for an account over its limits
        return EngineCompletion(self, account, request)

    def charge(self, account: Account, prompt: int) -> None:
        """Charge a prompt's tokens. Each token written is charged as a verify when it comes. Raises ApiError."""
        if wait := account.charge(prefill=prompt, verifies=0):
            self.gate.refused(RefusalReason.RATE)
            text = "over this token's limit of tokens per second"
            raise ApiError(429, text, None, "rate_limit_exceeded", math.ceil(wait))

    async def tokenize(self, account: Account, asked: ApiRequest) -> list[int]:
        """Return token ids of the prompt. Raises ApiError if it is unusable here."""
        ids = await self._worker.run(account.name, partial(self._encode, asked))
        if not ids:
            raise ApiError(400, "the chat template makes an empty prompt of these messages", "messages")
        if len(ids) >= (context := self.verifier.max_context):
            self.gate.refused(RefusalReason.TOO_LONG)
            text = f"the prompt has {len(ids)} tokens; at most {context - 1} fit this server's context"
            raise ApiError(400, text, "messages", "context_length_exceeded")
        if max(ids) >= self.verifier.vocab_size:  # would fail the step of every session
            raise ApiError(400, f"the prompt holds token {max(ids)}, which the model does not know", "messages")
        return ids

    def _encode(self, asked: ApiRequest) -> list[int]:
        """Encode the prompt. Runs in the tokenizer's thread."""
        prompt = asked.plain_prompt
        if asked.conversation is None:
            return prompt if isinstance(prompt, list) else self.tokenizer.encode_prompt(prompt)
        if not self.tokenizer.template:
            raise ApiError(400, f"{self.model} has no chat template; serve an instruct model", "model")
        try:
            return self.tokenizer.encode_chat(asked.conversation, asked.tool_use.prompt if asked.tool_use else ())
        except (TemplateError, ValueError, RecursionError) as error:
            raise ApiError(400, f"the chat template of {self.model} refuses this: {error}", "messages") from None

    async def rules(self, account: Account, constraint: Constraint | None, ids: list[int]) -> Rules | None:
        """Return rules of an answer to `ids`, or None without a constraint. Raises ApiError on unsupported ones.

        Compiling ends soon after this is cancelled.
        """
        if constraint is None:
            return None
        field, desk = field_of(constraint), self.verifier.constraints
        if why := desk.check(constraint, len(ids)):
            raise ApiError(400, why, field, "unsupported_parameter")
        left = threading.Event()
        try:
            return await asyncio.wrap_future(desk.prepare(account.name, constraint, ids, left.is_set))
        except GrammarError as error:
            raise ApiError(400, str(error), field, "invalid_schema") from None
        finally:
            left.set()


class EngineCompletion:
    """A session of the engine for each choice, one after another. See Completion.

    The account counts one stream for it from its creation, so that requests waiting to be read and tokenised are
    limited too.
    """

    _asked: ApiRequest
    _ids: list[int]
    _writer: ReplyWriter
    _record: CompletionRecord | None = None
    _session: EngineSession | None = None

    def __init__(self, backend: EngineBackend, account: Account, request: HTTPConnection) -> None:
        self._backend, self._verifier, self._account = backend, backend.verifier, account
        self._trace, self._begun = trace_of(request.scope), time.perf_counter()
        account.streams += 1

    async def prepare(self, asked: ApiRequest, size: int) -> ReplyWriter:
        """See Completion. Every choice reads the prompt anew, and is charged for it.

        A prompt is charged by its bytes before it is tokenised, whatever the result; the charge for a schema is never
        given back.
        """
        backend, paid = self._backend, size // BYTES_PER_TOKEN
        backend.charge(self._account, paid)
        if why := self._verifier.refusal(asked.sampling(0)):
            raise ApiError(400, why, "top_k", "unsupported_parameter")
        self._asked, self._ids = asked, await backend.tokenize(self._account, asked)
        constraint = asked.constraint(len(self._ids), self._verifier.vocab_size)
        schema = len(constraint.schema) // BYTES_PER_TOKEN if constraint else 0
        self._account.spend(prefill=max(0, len(self._ids) * asked.choices + schema - paid))
        self._rules = [await backend.rules(self._account, constraint, self._ids) for _ in range(asked.choices)]
        prompt_text = partial(backend.tokenizer.decode, self._ids)
        self._writer = asked.writer(backend.model, self._verifier.target_hash, len(self._ids), prompt_text)
        self._record = CompletionRecord(self._verifier.metrics, self._begun)
        self._session = await self._opened(0)  # before a stream begins, so that a refusal gets its own status
        return self._writer

    async def parts(self) -> AsyncIterator[Delta | Ending]:
        """See Completion."""
        assert self._record is not None and self._session is not None
        for choice in range(self._asked.choices):
            if choice:
                self._session.close()
                self._account.streams += 1
                await self._opened(choice)
            async for part in self._choice(self._session, self._record):
                yield part
        assert isinstance(part, Ending)
        self._record.finish(part.finish_reason)

    def failed(self, error: Exception) -> ApiError:
        """See Completion. An unexpected error is logged without its values, as they may hold text."""
        if self._record is not None:
            self._record.finish(ERROR)
        if isinstance(error, ApiError):
            return error
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("completion failed", error=type(error).__name__, where=where)
        return ApiError(500, "the server failed on this request; its log says where", code="internal_error")

    async def close(self) -> None:
        """See Completion."""
        if self._session is None:
            self._account.streams -= 1
        else:
            self._session.close()
        if self._record is not None:
            names = {"completion": self._writer.id, "account": self._account.name, "prompt_tokens": len(self._ids)}
            self._record.close(**names, **self._trace.fields)

    async def _opened(self, choice: int) -> EngineSession:
        asked = self._asked
        self._session = EngineSession(
            self._verifier,
            self._account,
            self._ids,
            asked.sampling(choice),
            self._rules[choice],
            token_limit(asked, self._verifier.max_context - len(self._ids)),
            self._trace.request,
            top=asked.top,
        )
        await self._session.opened()
        return self._session

    async def _choice(self, session: EngineSession, record: CompletionRecord) -> AsyncIterator[Delta | Ending]:
        tokenizer = self._backend.tokenizer
        text, stops = Detokeniser(tokenizer.decode, tokenizer.special_ids), StopStrings(self._asked.stops)
        drawn, reason, chances = 0, FinishReason.LENGTH, list[TokenChances]()
        async for token in session.tokens():
            drawn += 1
            record.token()
            piece = stops.push(text.push(token.token)) if token.is_text else ""
            if token.is_text and token.chances:
                chances.append(self._spelt(token.chances))
            if token.finish_reason is not None:
                reason = token.finish_reason
                piece += stops.push(text.flush())
                piece += stops.flush()
            if piece or (chances and token.finish_reason is not None):
                yield Delta(piece, chances=chances)
                chances = []
            if stops.hit:
                session.close()
                reason = FinishReason.STOP
                break
        drafted, accepted = session.drafted
        yield Ending(reason, drawn, drafted=drafted, accepted=accepted)

    def _spelt(self, chances: Chances) -> TokenChances:
        first, *others = [TokenChance(*self._backend.tokenizer.spelling(token), logprob) for token, logprob in chances]
        return TokenChances(first, others)
