"""`outrider generate`: one prompt, one answer, and an exit status that tells whether it was verified."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from edge_runtime.events import Event, Finished
from edge_runtime.link.transport import LinkMaker
from edge_runtime.runtime import EdgeRuntime
from outrider.cli.opening import CommandError
from outrider.cli.options import GenerateOptions
from outrider.cli.prompt import interrupts, whole_input
from outrider.cli.reach import Reach
from outrider.cli.terminal import Output, show_answer, summary
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.ending import COMPLETE, FinishReason

#: exit status if a server was given and did not verify all of the answer; and if it refused the answer
UNVERIFIED, REFUSED = 3, 4
OFFLINE = "offline: all text below was written on this device and is unverified"


def prompt_of(parts: Sequence[str]) -> str:
    """Return the question; standard input is inserted as a separate paragraph for "-".

    It is not read otherwise: a loop around this command may use it, and an open pipe would never end.
    """
    if "-" not in parts:
        return " ".join(parts)
    place = parts.index("-")
    around = " ".join(parts[:place]), whole_input().strip(), " ".join(parts[place + 1 :])
    return "\n\n".join(part for part in around if part)


def described(event: Event, unfinished: FinishReason | None) -> dict[str, Any]:
    """Return an answer in the form of --json. unfinished: why it has no end of its own; None: Ctrl-C."""
    answer: dict[str, Any] = {"text": event.verified + event.provisional, "verified_text": event.verified}
    if not isinstance(event, Finished):
        return {**answer, "reason": unfinished or FinishReason.CANCELLED}
    spans = [asdict(span) for span in event.spans]
    answer |= {"reason": event.reason, "detail": event.detail, "token_ids": event.token_ids, "spans": spans}
    return {**answer, **event.stats.as_dict()}


async def generate(options: GenerateOptions, bundle: Bundle, server: str | LinkMaker | None) -> int:
    """Answer one prompt. Returns the exit status."""
    prompt = prompt_of(options.prompt)
    if not prompt.strip():
        raise CommandError("the prompt is empty; write it after the options, or write - and send it on standard input")
    output = Output.standard(json=options.json)
    asked = server if isinstance(server, str) and options.policy != "device-only" else None
    async with AsyncExitStack() as stack:
        stopped = stack.enter_context(interrupts())
        runtime = await stack.enter_async_context(EdgeRuntime(bundle, server, options.runtime()))
        if server is None:
            output.note(OFFLINE)
        reach = Reach(runtime, asked, output.tell, options.give_up, "--give-up")
        events = runtime.generate([{"role": "user", "content": prompt}], **options.answer(options.stop))
        last = Event("", "")

        def remember(event: Event) -> None:
            nonlocal last
            last = event

        event = await show_answer(runtime, events, output, reach, stopped, local=options.in_process, each=remember)
        if options.json:
            print(json.dumps(described(event or last, FinishReason.UNREACHABLE if reach.gave_up else None)))
        if event is None and not reach.gave_up:
            return 130
        if event and not options.json:
            output.note(summary(event))
        if event and event.reason is FinishReason.REFUSED:
            output.tell(f"the verifier refused this: {event.detail}")
            return REFUSED
        if asked and (event is None or not event.stats.tokens or event.provisional or event.reason not in COMPLETE):
            output.tell(reach.advice)
            return UNVERIFIED
    return 0
