"""`outrider chat`: a conversation, turn by turn, that survives its terminal."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace

from edge_runtime.events import Event, Finished
from edge_runtime.link.transport import LinkMaker
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import WhoWrites
from outrider.cli.journal import Journal
from outrider.cli.options import ChatOptions
from outrider.cli.prompt import Interrupted, Keyboard
from outrider.cli.reach import Reach
from outrider.cli.terminal import Output, show_answer, summary
from outrider_core.cache import expanded
from outrider_core.drafting.bundle import Bundle, BundleError

WELCOME = "/help shows the commands. Ctrl-C stops an answer, Ctrl-D ends the chat."
AGAIN = "Ctrl-C once more or Ctrl-D ends the chat."
PROMPT, MORE = "you> ", "...> "
#: begins and ends a message of several lines
QUOTES = '"""'
#: command -> description
COMMANDS = {
    "/system TEXT": 'instruct the model; without TEXT show the instruction, "" removes it',
    "/clear": "forget the conversation, but not the instruction",
    "/save FILE": "write the conversation, for outrider chat --journal FILE",
    "/stats": "tokens, speed and context so far",
    "/model": "model, bundle and verifier in use",
    "/offline on|off": "write on this device alone, unverified, or with the verifier again",
    "/help": "this list",
    "/bye": "end the chat, as Ctrl-D does",
    QUOTES: "begins and ends a message or a /system text of several lines; \\ at the end of a line continues it",
}
#: other tools' names for the same
HABITS = {"?": "help", "exit": "bye", "quit": "bye"}


class Chat:
    """A conversation in this terminal. server: see `EdgeRuntime`; keyboard: source of lines."""

    def __init__(
        self, options: ChatOptions, bundle: Bundle, server: str | LinkMaker | None, keyboard: Keyboard
    ) -> None:
        self._options, self._bundle, self._server, self._keyboard = options, bundle, server, keyboard
        self._output = Output.standard()
        self._journal = Journal(options.journal, self._output.tell)
        self._stack = AsyncExitStack()
        self._messages: list[dict[str, str]] = []
        self._answers: list[Finished] = []
        self._context = 0  # tokens of the last prompt with its answer
        self._dropped = 0  # messages that the context no longer holds
        self._alone: EdgeRuntime | None = None  # for /offline

    async def run(self) -> int:
        """Talk until the user ends it; returns the exit status."""
        async with self._stack:
            self._stack.enter_context(self._journal.alone())
            self._messages, unfinished = self._journal.load()
            runtime = EdgeRuntime(self._bundle, self._server, self._options.runtime())
            self._linked = await self._stack.enter_async_context(runtime)
            self._use(self._linked)
            self._output.note(WELCOME)
            for message in self._messages:
                self._output.notices.print(f"[dim]{message['role']}>[/] ", end="")
                self._output.notices.print(message["content"], markup=False, highlight=False, soft_wrap=True)
            if unfinished:
                self._output.note("continuing the answer that was cut off")
                try:
                    await self._show(runtime.resume(unfinished))
                except ValueError as error:
                    self._output.tell(f"cannot continue the answer that was cut off: {error}")
            while typed := await self._typed():
                command, text = typed
                if not command:
                    await self._ask(text)
                elif not await self._obey(command, text.strip()):
                    break
        return 0

    def _use(self, runtime: EdgeRuntime) -> None:
        """Answer with `runtime` from here on."""
        self._runtime = runtime
        watched = runtime is self._linked and isinstance(self._server, str) and self._has_verifier
        self._reach = Reach(runtime, str(self._server) if watched else None, self._output.tell)

    @property
    def _has_verifier(self) -> bool:
        return self._linked.policy.writer is not WhoWrites.DEVICE_ONLY

    async def _typed(self) -> tuple[str, str] | None:
        """Return a command and its argument, or "" and a message; None ends the chat.

        The first Ctrl-C only clears the line.
        """
        interrupted = False
        self._output.notices.print()
        while True:
            try:
                text = await self._keyboard.next(PROMPT)
                if opened := re.fullmatch(rf"\s*(/system\s+)?{QUOTES}(.*)", text, re.DOTALL):
                    if quoted := await self._quoted(opened[2]):
                        return "system" if opened[1] else "", quoted
                    continue
                while text.endswith("\\"):
                    text = text[:-1] + "\n" + await self._keyboard.next(MORE)
            except EOFError:
                self._output.notices.print()
                return None
            except Interrupted:
                self._output.notices.print()
                if interrupted:
                    return None
                interrupted = True
                self._output.note(AGAIN)
                continue
            if command := re.fullmatch(r"/([a-zA-Z?]*)(?:\s+(.*))?", text.strip(), re.DOTALL):
                return command[1].lower() or "?", command[2] or ""
            if text.strip():
                return "", text

    async def _quoted(self, text: str) -> str:
        """Return `text` and the following lines, up to closing quotes. Raises as `Keyboard.next`."""
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + await self._keyboard.next(MORE)
        text = text.rstrip().removesuffix(QUOTES).strip("\n")
        return text if text.strip() else ""

    async def _ask(self, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        try:
            fitted = self._runtime.fit_messages(self._messages, self._options.max_tokens)
        except (ValueError, BundleError) as error:  # too long, or its template takes no instruction
            self._messages.pop()
            self._output.tell(str(error))
            return
        if len(fitted.dropped) > self._dropped:
            self._dropped = len(fitted.dropped)
            self._output.tell(f"the context is full: the model no longer sees the first {self._dropped} messages")
        await self._show(self._runtime.generate(fitted.messages, **self._options.answer()), len(fitted.ids))

    async def _show(self, events: AsyncGenerator[Event, None], prompt: int = 0) -> None:
        """Show an answer and keep it. prompt: its tokens. Raises ValueError if it cannot be resumed."""

        def keep(_event: Event) -> None:
            if self._journal.due:
                self._journal.keep(self._messages, self._runtime.record())

        event = await show_answer(
            self._runtime,
            events,
            self._output,
            self._reach,
            self._keyboard.stopped,
            local=self._options.in_process,
            each=keep,
        )
        if event is None:
            self._output.note("stopped")
            self._messages.pop()
        else:
            self._messages.append({"role": "assistant", "content": event.verified + event.provisional})
            self._answers.append(event)
            self._context = prompt + len(event.token_ids)
            self._output.note(f"{prompt} prompt tokens, {summary(event)}" if prompt else summary(event))
        await self._journal.finish(self._messages)

    async def _obey(self, command: str, argument: str) -> bool:
        """Carry out a command; False ends the chat."""
        match HABITS.get(command, command):
            case "help":
                self._output.note("\n".join(f"{name:<17}{text}" for name, text in COMMANDS.items()))
            case "system":
                await self._instruct(argument)
            case "clear":
                self._messages = self._messages[: self._instructions]
                self._dropped = self._context = 0
                for runtime in (self._linked, self._alone):
                    if runtime:
                        runtime.forget()
                await self._journal.finish(self._messages)
            case "save":
                self._save(argument)
            case "stats":
                self._output.note(self._stats())
            case "model":
                self._output.note(self._model())
            case "offline":
                await self._offline(argument)
            case "bye":
                return False
            case _:
                self._output.tell(f"unknown command /{command}; /help lists all")
        return True

    @property
    def _instructions(self) -> int:
        """Return how many messages at the beginning instruct the model."""
        return int(bool(self._messages) and self._messages[0]["role"] == "system")

    async def _instruct(self, text: str) -> None:
        """Set the instruction, or show it if there is no `text`."""
        if not text:
            shown = self._messages[0]["content"] if self._instructions else 'none; "/system TEXT" sets one'
            self._output.note(f"instruction: {shown}")
            return
        wanted = text[1:-1] if re.fullmatch(r'"[^"]*"', text) else text
        self._messages[: self._instructions] = [{"role": "system", "content": wanted}] if wanted else []
        await self._journal.finish(self._messages)

    def _save(self, name: str) -> None:
        if not name:
            self._output.tell("/save needs the name of a file")
            return
        path = expanded(name)
        try:
            Journal(path, self._output.tell).begin(self._messages)
        except ValueError as error:
            self._output.tell(str(error))
        else:
            self._output.note(f"saved; to continue: outrider chat --journal {shlex.quote(str(path))}")

    def _stats(self) -> str:
        stats = [answer.stats for answer in self._answers]
        if not stats:
            return "no answer yet"
        tokens, seconds = sum(len(answer.token_ids) for answer in self._answers), sum(each.seconds for each in stats)
        return (
            f"answers: {len(stats)}, {tokens} tokens in {seconds:.1f} s\n"
            f"context: {self._context} of {self._bundle.manifest.max_context} tokens\n"
            f"last answer: {summary(self._answers[-1])}"
        )

    def _model(self) -> str:
        manifest, link = self._bundle.manifest, self._linked.link
        verifier = "none" if not link else "in this process" if self._options.in_process else str(self._server)
        if link and link.welcome:
            verifier += f", {link.welcome.arithmetic} arithmetic, context {link.welcome.max_context}"
        elif link:
            verifier += f", no connection: {self._linked.link_error or 'none now'}"
        return (
            f"{manifest.target}, hash {manifest.target_hash}; drafter {manifest.drafter_hash or 'none'}; "
            f"context {manifest.max_context}\n"
            f"bundle: {self._bundle.folder}\n"
            f"verifier: {verifier}{'; /offline is on' if self._runtime is not self._linked else ''}"
        )

    async def _offline(self, wanted: str) -> None:
        """Write on this device alone, or with the verifier again."""
        if not self._has_verifier:
            self._output.note("no verifier: everything is written on this device, unverified")
        elif wanted == "on":
            if self._alone is None:  # with the same engine
                options = replace(self._options.runtime(), engine=self._linked.drafter.engine)
                self._alone = await self._stack.enter_async_context(EdgeRuntime(self._bundle, None, options))
            self._use(self._alone)
            self._output.note("offline: from here on this device writes alone, and its text is unverified")
        elif wanted == "off":
            self._use(self._linked)
            self._output.note("online: the verifier writes again")
        else:
            self._output.tell(f"/offline on or /offline off; it is {'off' if self._runtime is self._linked else 'on'}")
