"""A tiny random float64 target behind a real socket, its bundle, and what a user would see."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.links import EmulatedLink
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import torch_model
from edge_runtime.events import Adopted, Event, Finished, Provisional, RolledBack, Verified
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.timeouts import Patience
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import in_chunks
from tests.tiny import plain_decode

MAX_NEW = 40
PATIENCE = Patience(open=0.6, connect=0.3, silence=1.0, offline=180.0)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=11),
    Sampling(temperature=1.0, seed=12),
    Sampling(temperature=1.0, top_p=0.9, top_k=40, seed=13),
]


def make_verifier(folders: tuple[Path, Path, Path]) -> Verifier:
    settings = Settings(max_model_len=120, max_nodes=16, kv_tokens=600, max_sessions=8)
    target = load_target(TargetSource.resolve(str(folders[0])), "float64")
    return in_chunks(Verifier(torch_model(target, load_drafter(folders[1]), settings), settings), 16)


def oracle(folders: tuple[Path, Path, Path], prompt: list[int], sampling: Sampling) -> list[int]:
    return plain_decode(
        load_target(TargetSource.resolve(str(folders[0])), "float64").model, prompt, sampling, MAX_NEW, max_context=120
    )


class Screen:
    """What a user sees, kept from the events alone."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.verified = 0

    def show(self, event: Event) -> None:
        match event:
            case Verified(tokens=tokens):
                self.tokens[self.verified :] = tokens + self.tokens[self.verified + len(tokens) :]
                self.verified += len(tokens)
            case Provisional(token=token):
                self.tokens.append(token)
            case Adopted(tokens=tokens):
                assert self.tokens[self.verified :] == tokens
                self.verified += len(tokens)
            case RolledBack(count=count):
                del self.tokens[len(self.tokens) - count :]


async def answer(runtime: EdgeRuntime, prompt: list[int], sampling: Sampling) -> tuple[Finished, list[int]]:
    screen = Screen()
    async for event in runtime.generate(
        prompt, max_new_tokens=MAX_NEW, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        seed=sampling.seed,
    ):  # fmt: skip
        screen.show(event)
    assert isinstance(event, Finished)
    return event, screen.tokens


class BothVersions(EmulatedLink):
    """One address; every connection goes to the other version than the one before."""

    def __init__(self, *ports: int) -> None:
        super().__init__(ports[0])
        self.ports, self.dials = ports, 0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.upstream_port = self.ports[self.dials % len(self.ports)]
        self.dials += 1
        await super()._accept(reader, writer)
