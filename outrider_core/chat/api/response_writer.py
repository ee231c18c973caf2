"""Replies of `/v1/responses`, as one object or as its many kinds of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from outrider_core.chat.api.errors import ApiError
from outrider_core.chat.api.replies import (
    AnswerParts,
    Delta,
    Ending,
    Usage,
    chances_of,
    event,
    told,
)
from outrider_core.chat.api.tools import CallDelta
from outrider_core.protocol.ending import FinishReason

ResponseEvent = dict[str, Any]


class ResponseWriter:
    """See `outrider_core.chat.api.replies.ReplyWriter`. echoed: fields of the request that a reply repeats.

    calls: the answer may call functions. formed, required, schemas: see `outrider_core.chat.api.replies.with_calls`.
    """

    def __init__(
        self,
        model: str,
        echoed: Mapping[str, Any],
        prompt_tokens: int,
        calls: bool = False,
        formed: bool = False,
        required: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.id = f"resp_{secrets.token_hex(16)}"
        self._told = told(calls, formed, required, schemas)
        self._calls, self._usage = calls, Usage(prompt_tokens)
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            **echoed,
        }
        self._output = list[dict[str, Any]]()
        self._open = False  # whether the last item of the output still grows

    async def whole(self, answer: AnswerParts) -> dict[str, Any]:
        """See ReplyWriter."""
        async for part in self._told(answer):
            for _ in self._grown(part):
                pass
        assert isinstance(part, Ending)
        return self._body(*_status(part), part.extension)

    async def events(self, answer: AnswerParts) -> AsyncIterator[bytes]:
        """See ReplyWriter."""
        number = 0

        def numbered(kind: str, fields: ResponseEvent) -> bytes:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

        begun = self._body("in_progress", None, {})
        yield numbered("response.created", {"response": begun})
        yield numbered("response.in_progress", {"response": begun})
        try:
            async for part in self._told(answer):
                for each in self._grown(part):
                    yield numbered(each.pop("type"), each)
            assert isinstance(part, Ending)
            status, details = _status(part)
            yield numbered(f"response.{status}", {"response": self._body(status, details, part.extension)})
        except ApiError as error:
            told = {"code": error.code or "server_error", "message": error.message}
            yield numbered("response.failed", {"response": {**self._body("failed", None, {}), "error": told}})

    def _body(self, status: str, details: ResponseEvent | None, extension: Mapping[str, Any]) -> ResponseEvent:
        usage = {
            "input_tokens": self._usage.prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self._usage.drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._usage.prompt + self._usage.drawn,
            "outrider": self._usage.extension,
        }
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": details,
            "output": self._output,
            "usage": None if status == "in_progress" else usage,
            **extension,
        }

    def _grown(self, part: Delta | Ending) -> Iterator[ResponseEvent]:
        """Extend the output by a part of the answer; yield the events for it."""
        if isinstance(part, Ending):
            self._usage.add(part)
            if not self._output:
                yield from self._message()
            calling = self._output[-1]["type"] == "function_call"  # a stop string ended it if it is not TOOL_CALLS
            reason = part.finish_reason
            cut = reason == FinishReason.LENGTH or (calling and reason == FinishReason.STOP)
            yield from self._closed("incomplete" if cut else "completed")
        elif part.call is not None:
            yield from self._called(part.call)
        elif part.text or part.chances or (part.extension and not self._calls):
            yield from self._said(part)

    def _said(self, part: Delta) -> Iterator[ResponseEvent]:
        if not (self._open and self._output[-1]["type"] == "message"):
            yield from self._message()
        content = self._output[-1]["content"][0]
        content["text"] += part.text
        chances = [chances_of(each) for each in part.chances]
        content["logprobs"] += chances
        yield {
            **self._place("response.output_text.delta"),
            "content_index": 0,
            "delta": part.text,
            "logprobs": chances,
            **part.extension,
        }

    def _message(self) -> Iterator[ResponseEvent]:
        """Begin an item of text."""
        yield from self._closed("completed")
        item = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant"}
        yield from self._begun({**item, "status": "in_progress", "content": []})
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output[-1]["content"].append(content)
        yield {**self._place("response.content_part.added"), "content_index": 0, "part": {**content}}

    def _called(self, call: CallDelta) -> Iterator[ResponseEvent]:
        if call.id:
            yield from self._closed("completed")
            item = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "call_id": call.id}
            yield from self._begun({**item, "name": call.name, "arguments": "", "status": "in_progress"})
        if call.arguments:
            self._output[-1]["arguments"] += call.arguments
            yield {**self._place("response.function_call_arguments.delta"), "delta": call.arguments}

    def _begun(self, item: ResponseEvent) -> Iterator[ResponseEvent]:
        self._output.append(item)
        self._open = True
        place = {"output_index": len(self._output) - 1}
        yield {"type": "response.output_item.added", **place, "item": {**item}}

    def _closed(self, status: str) -> Iterator[ResponseEvent]:
        """End the growing item, if there is one."""
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "message":
            content = item["content"][0]
            place = {"content_index": 0}
            text = {"text": content["text"], "logprobs": content["logprobs"]}
            yield {**self._place("response.output_text.done"), **place, **text}
            yield {**self._place("response.content_part.done"), **place, "part": content}
        else:
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            yield {**self._place("response.function_call_arguments.done"), **arguments}
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}

    def _place(self, kind: str) -> ResponseEvent:
        return {"type": kind, "item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}


def _status(ending: Ending) -> tuple[str, ResponseEvent | None]:
    """Return the response's status, and the event of an incomplete one."""
    if ending.finish_reason == FinishReason.LENGTH:
        return "incomplete", {"reason": "max_output_tokens"}
    return "completed", None
