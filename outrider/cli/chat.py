"""`outrider chat`: a conversation, turn by turn, that survives its terminal."""

from __future__ import annotations

from contextlib import AsyncExitStack

from edge_runtime.context import ConversationTooLong
from edge_runtime.events import Event
from edge_runtime.link.transport import LinkMaker
from edge_runtime.runtime import EdgeRuntime
from outrider.cli.journal import Journal
from outrider.cli.options import ChatOptions
from outrider.cli.prompt import Interrupted, LineReader, interrupts
from outrider.cli.reach import Reach
from outrider.cli.terminal import Output, show_answer, summary
from outrider_core.drafting.bundle import Bundle

WELCOME = "Ctrl-C stops an answer, Ctrl-D or an empty line ends the chat."
AGAIN = "Ctrl-C once more, Ctrl-D or an empty line ends the chat."


async def chat(options: ChatOptions, bundle: Bundle, server: str | LinkMaker | None) -> int:
    """Talk until the user ends it; returns the exit status."""
    output = Output.standard()
    journal = Journal(options.journal, output.tell)
    async with AsyncExitStack() as stack:
        stack.enter_context(journal.alone())
        messages, unfinished = journal.load()
        stopped = stack.enter_context(interrupts())
        runtime = await stack.enter_async_context(EdgeRuntime(bundle, server, options.runtime()))
        watched = server if isinstance(server, str) and options.policy != "device-only" else None
        reach = Reach(runtime, watched, output.tell)
        lines, forgotten = LineReader(stopped), 0
        output.note(WELCOME)
        for message in messages:
            output.notices.print(f"[dim]{message['role']}>[/] ", end="")
            output.notices.print(message["content"], markup=False, highlight=False, soft_wrap=True)
        while True:
            if unfinished:
                output.note("going on with the answer that was cut off")
                events = runtime.resume(unfinished)
            else:
                question = await _question(lines, output)
                if not question.strip():
                    return 0
                messages.append({"role": "user", "content": question})
                try:
                    fitted = runtime.fit_messages(messages, options.max_tokens)
                except ConversationTooLong as error:
                    messages.pop()
                    output.tell(str(error))
                    continue
                if len(fitted.dropped) > forgotten:
                    forgotten = len(fitted.dropped)
                    output.tell(f"the context is full: the model no longer sees the first {forgotten} messages")
                events = runtime.generate(fitted.messages, **options.answer())
            resumed, unfinished = unfinished is not None, None

            def keep(_event: Event) -> None:
                if journal.due:
                    journal.keep(messages, runtime.record())

            try:
                event = await show_answer(runtime, events, output, reach, stopped, local=options.in_process, each=keep)
            except ValueError as error:
                if not resumed:
                    raise
                output.tell(f"cannot go on with the answer that was cut off: {error}")
                continue
            if event is None:
                output.note("stopped")
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": event.verified + event.provisional})
                output.note(summary(event))
            await journal.finish(messages)


async def _question(lines: LineReader, output: Output) -> str:
    """What the user types; "" where the chat shall end. The first Ctrl-C only clears the line."""
    interrupted = False
    while True:
        output.notices.print("\nyou> ", end="")
        try:
            return await lines.next()
        except EOFError:
            output.notices.print()
            return ""
        except Interrupted:
            output.notices.print()
            if interrupted:
                return ""
            interrupted = True
            output.note(AGAIN)
