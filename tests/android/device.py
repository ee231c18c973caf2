"""android_demo/core's runtime in a JVM of its own, driven over its standard input and output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from android_demo.ci import core
from edge_runtime.session.timeouts import Patience
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from export.bundle.verifier_process import VerifierProcess
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.tiny import save_tiny_drafter, save_tiny_target

PATIENCE = Patience(open=0.6, connect=0.3, silence=1.0, offline=60.0)
MAX_CONTEXT = 120
#: the property in which a test reports how many Kotlin tests passed in it
KOTLIN_TESTS = "kotlin tests"
#: seconds to wait for an event at most
LONGEST = 120.0

Event = dict[str, Any]


@dataclass
class Screen:
    """What a user sees, kept from the events alone, and (unless `texts` is False) checked against their texts."""

    tokens: list[int] = field(default_factory=list)
    verified: int = 0
    texts: bool = True
    events: list[Event] = field(default_factory=list)

    def show(self, event: Event) -> None:
        self.events.append(event)
        match event["event"]:
            case "verified":
                tokens, confirmed = event["tokens"], event["confirmed"]
                assert self.tokens[self.verified : self.verified + confirmed] == tokens[:confirmed]
                self.tokens[self.verified :] = tokens + self.tokens[self.verified + len(tokens) :]
                self.verified += len(tokens)
            case "written":
                self.tokens.append(event["token"])
            case "adopted":
                assert self.tokens[self.verified :] == event["tokens"]
                self.verified += len(event["tokens"])
            case "rolled_back":
                assert event["count"] <= len(self.tokens) - self.verified
                del self.tokens[len(self.tokens) - event["count"] :]
        assert not self.texts or event["verified"] == words(self.tokens[: self.verified])
        if self.texts and event["event"] != "rolled_back":  # where the verified event right behind it shows what agreed
            assert (event["verified"] + " " + event["provisional"].strip()).strip() == words(self.tokens)

    @property
    def end(self) -> Event:
        assert self.events[-1]["event"] == "finished", self.events[-1]
        return self.events[-1]


def words(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens if token > 3)


class Device:
    """One process. `server`: an address, or None. program: what runs in it, options of the JVM first."""

    def __init__(
        self, classpath: list[Path], bundle: Path, server: str | None,
        program: Sequence[str] = ("dev.outrider.core.ClientKt",), **settings: Any,
    ) -> None:  # fmt: skip
        self.command = core.java(classpath, *program)
        self.settings = {
            "bundle": str(bundle), "server": server, "writer": "PREFER_CLOUD", "on_return": "REPAIR",
            "offline": "CONTINUE", "understudy": "COLD", "hash_understudy": False, "mode": None,
            "ahead": None, "offline_rate": 20.0, "token": None, "ca_file": None, "pins": [],
            "own_transport": False, "patience": asdict(PATIENCE),
            **settings,
        }  # fmt: skip
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Device:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(*self.command, stdin=pipe, stdout=pipe, limit=1 << 22)
        self.say(json.dumps(self.settings))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process
        if kind is None and self.process.returncode is None:
            self.say("quit")
            assert await asyncio.wait_for(self.process.wait(), LONGEST) == 0
        elif self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def say(self, line: str) -> None:
        assert self.process and self.process.stdin
        self.process.stdin.write(line.encode() + b"\n")

    async def hear(self) -> Event:
        """The next event."""
        assert self.process and self.process.stdout
        line = await asyncio.wait_for(self.process.stdout.readline(), LONGEST)
        assert line, "the device ended"
        event: Event = json.loads(line)
        return event

    def ask(
        self, prompt: list[int], sampling: Sampling | None = None, max_new: int = 40, stop: Sequence[str] = (),
        script: Sequence[int] = (), record: str | None = None, held_to: dict[str, Any] | None = None,
        understudy_script: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Begin an answer. script: tokens that the engine likes to foresee; understudy_script: those that the
        understudy likes to write. record: go on with that one.

        held_to: OpenAI's fields of biases, penalties, forms and tools.
        """
        sampling = msgspec.structs.asdict(sampling or Sampling())
        self.say(
            json.dumps(
                {"prompt": prompt, "sampling": sampling, "max_new": max_new, "stop": list(stop),
                 "script": list(script), "record": record, "held_to": held_to,
                 "understudy_script": list(understudy_script)}
            )
        )  # fmt: skip

    async def watch(
        self, each: Callable[[Screen], Awaitable[None]] | None = None, screen: Screen | None = None
    ) -> Screen:
        """Follow the answer to its end."""
        screen = screen or Screen()
        while not screen.events or screen.events[-1]["event"] not in ("finished", "refused"):
            event = await self.hear()
            if event["event"] == "refused":
                screen.events.append(event)
                return screen
            screen.show(event)
            if each:
                await each(screen)
        return screen


def tiny_folders(root: Path, model: Any, tokenizer: Any | None = None) -> dict[str, Path]:
    """Write the model as a target, a random drafter for all tokens but the first three, and their bundle."""
    folders = {name: root / name for name in ("target", "drafter", "bundle")}
    target_hash = save_tiny_target(folders["target"], model, tokenizer)
    save_tiny_drafter(folders["drafter"], model, target_hash, torch.arange(3, model.config.vocab_size))
    write_bundle(
        BundleOptions(
            target=TargetSource.resolve(str(folders["target"])),
            drafter=folders["drafter"],
            output_dir=folders["bundle"],
            quant="fp32",
        )
    )
    return folders


def verifier_of(folders: dict[str, Path], *arguments: str) -> VerifierProcess:
    return VerifierProcess(
        folders["drafter"], folders["target"].parent / "log", "--model", str(folders["target"]), "--dtype", "float64",
        "--threads", "1", "--max-model-len", str(MAX_CONTEXT), "--max-nodes", "32", "--kv-tokens", "600", *arguments,
    )  # fmt: skip
