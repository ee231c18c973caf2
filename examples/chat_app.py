"""A complete small chat app: asyncio, verified and provisional text apart, and an answer that survives a restart.

    pip install 'outrider[edge]'
    python examples/chat_app.py --bundle build/bundle --server 127.0.0.1:8765 --state chat.json

Kill it in mid-answer and start it again: the answer continues where it was. Disconnect the network: the drafter keeps
writing, underlined, and its text is verified when the network is back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.text import Text

from outrider import BundleError, DrafterFailed, EdgeRuntime, Event, Finished, LinkRefused, LinkState


@dataclass
class Chat:
    """The app's state: the conversation, and the record of an unfinished answer."""

    messages: list[dict[str, str]] = field(default_factory=list)
    record: dict[str, Any] | None = None

    @classmethod
    def load(cls, path: Path) -> Chat:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, path: Path) -> None:
        """Save in one step, readable to its owner only: it holds the conversation."""
        aside = path.with_suffix(".new")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
        aside.replace(path)


def render(event: Event) -> Text:
    """Show verified text plain, and text that may still be rolled back underlined."""
    return Text.assemble(event.verified, (event.provisional, "underline yellow"))


async def show(runtime: EdgeRuntime, events: AsyncGenerator[Event, None], chat: Chat, path: Path) -> None:
    """Show one answer as it grows, and save after every event what a later process needs to continue it."""
    with Live(auto_refresh=False) as live:
        async for event in events:
            live.update(render(event), refresh=True)
            match event:
                case LinkState(state="alone", detail=reason):
                    live.console.print(f"[dim]writing alone: {reason}[/]")
                case Finished(verified=verified, provisional=provisional):
                    chat.messages.append({"role": "assistant", "content": verified + provisional})
            chat.record = runtime.record() if not isinstance(event, Finished) else None
            chat.save(path)


def ask() -> str:
    """Ask for a question; "" to leave."""
    try:
        return input("you> ").strip()
    except EOFError:
        return ""


async def talk(bundle: Path, server: str | None, path: Path, max_new_tokens: int) -> None:
    chat = Chat.load(path)
    async with EdgeRuntime.from_bundle(bundle, server) as runtime:
        if chat.record:
            print("continuing the answer that was cut off")
            await show(runtime, runtime.resume(chat.record), chat, path)
        while question := await asyncio.to_thread(ask):
            chat.messages.append({"role": "user", "content": question})
            fitted = runtime.fit_messages(chat.messages, reserve=max_new_tokens)
            await show(runtime, runtime.generate(fitted.messages, max_new_tokens=max_new_tokens), chat, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("build/bundle"))
    parser.add_argument("--server", help="of an `outrider verifier`; without one everything is written offline")
    parser.add_argument("--state", type=Path, default=Path("chat.json"), help="file that keeps the chat")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args()
    try:
        asyncio.run(talk(options.bundle, options.server, options.state, options.max_new_tokens))
    except (BundleError, DrafterFailed, LinkRefused, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
