"""The app without its screens in a JVM of its own, driven over its standard input and output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from android_demo.ci import core
from benchmarks.links import EmulatedLink
from tests.android.device import LONGEST, Device

MAX_NEW = 40
PROMPT = [1, *range(60, 90)]
QUESTION = " ".join(f"w{token}" for token in PROMPT)

State = dict[str, Any]


class Phone(Device):
    """The app in a process of its own; `states` is all that its screen showed."""

    def __init__(
        self, classpath: list[Path], bundle: Path, server: str | None, journal: Path, tiny: bool = True, *options: str,
        executorch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(classpath, bundle, server)
        self.command = core.java(classpath, *options, "dev.outrider.app.chat.ClientKt")
        self.settings = {
            "bundle": str(bundle), "server": server, "writer": "PREFER_CLOUD", "journal": str(journal), "tiny": tiny,
            "answer_tokens": MAX_NEW, "executorch": executorch,
        }  # fmt: skip
        self.states: list[State] = []

    async def until(self, found: Callable[[State], bool]) -> State:
        """The first state from now on of which that holds."""

        async def look() -> State:
            while True:
                self.states.append(await self.hear())
                if found(self.states[-1]):
                    return self.states[-1]

        return await asyncio.wait_for(look(), LONGEST)

    async def kill(self) -> None:
        assert self.process
        self.process.kill()
        await self.process.wait()


def text(pieces: list[list[str]] | None, *kinds: str) -> str:
    return "".join(piece for kind, piece in pieces or [] if kind in kinds)


def alone(state: State) -> bool:
    """Whether the device wrote a good deal on its own."""
    return state["badge"] == "alone" and len(text(state["reply"], "provisional").split()) >= 5


def ended(state: State) -> bool:
    return len(state["turns"]) == 2 and state["reply"] is None


async def airplane(phone: Phone, link: EmulatedLink) -> None:
    """Ask; once the answer has begun the link is silent until the device has written on, and then broken and back."""
    await phone.until(lambda state: state["ready"])
    phone.say(QUESTION)
    await phone.until(lambda state: len(text(state["reply"], "verified").split()) >= 4)
    link.silent = True
    await phone.until(alone)
    link.silent = False
    link.cut()
    await phone.until(ended)
