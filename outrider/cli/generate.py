"""`outrider generate`: one prompt, one answer, an exit status that says whether it was verified."""

from __future__ import annotations

import json
import os
import stat
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict

from edge_runtime.link.transport import LinkMaker
from edge_runtime.runtime import EdgeRuntime
from outrider.cli.opening import CommandError
from outrider.cli.options import GenerateOptions
from outrider.cli.prompt import interrupts, whole_input
from outrider.cli.reach import Reach
from outrider.cli.terminal import Output, show_answer, summary
from outrider_core.drafting.bundle import Bundle
from outrider_core.protocol.ending import FinishReason

#: exit status where a server was given and verified nothing, or was waited for in vain; and where it refused the answer
UNVERIFIED, REFUSED = 3, 4
OFFLINE = "offline: all text below was written on this device and is unverified"


def piped() -> list[str]:
    """What a pipe or a file gives to standard input: it goes behind the prompt, as in `cat notes | outrider generate
    "summarise:"`. Nothing is read from a terminal or from a program that left its own standard input to this one."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed
        return []
    text = whole_input().strip() if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""
    return [text] if text else []


async def generate(options: GenerateOptions, bundle: Bundle, server: str | LinkMaker | None) -> int:
    """Returns the exit status."""
    prompt = whole_input() if options.prompt == "-" else "\n\n".join([options.prompt, *piped()])
    if not prompt.strip():
        raise CommandError("the prompt is empty; write it behind the options, or write - and send it on standard input")
    output = Output.standard(json=options.json)
    asked = server if isinstance(server, str) and options.policy != "device-only" else None
    async with AsyncExitStack() as stack:
        stopped = stack.enter_context(interrupts())
        runtime = await stack.enter_async_context(EdgeRuntime(bundle, server, options.runtime()))
        if server is None:
            output.note(OFFLINE)
        reach = Reach(runtime, asked, output.tell, options.give_up, "--give-up")
        events = runtime.generate([{"role": "user", "content": prompt}], **options.answer(options.stop))
        event = await show_answer(runtime, events, output, reach, stopped, local=options.local)
        if event is None and not reach.gave_up:
            return 130
        if event and options.json:
            text = {"text": event.verified + event.provisional, "verified_text": event.verified}
            spans = [asdict(span) for span in event.spans]
            answer = {
                **text,
                "reason": event.reason,
                "detail": event.detail,
                "token_ids": event.token_ids,
                "spans": spans,
            }
            print(json.dumps({**answer, **event.stats.as_dict()}))
        elif event:
            output.note(summary(event))
        if event and event.reason is FinishReason.REFUSED:
            output.tell(f"the verifier refused this: {event.detail}")
            return REFUSED
        if asked and (event is None or not event.stats.tokens or event.reason is FinishReason.UNREACHABLE):
            output.tell(reach.advice)
            return UNVERIFIED
    return 0
