"""Tensor parallelism inside one verifier: rank 0 decides, the others repeat what it does.

Start it with torchrun, one process a device. transformers shards the target's weights; each rank keeps the keys
and values of its own KV heads. Rank 0 serves; before it runs anything it tells the others over a group of its own
(gloo, so that no small message ever waits for the device). Commands are MessagePack, never pickle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cloud.runner import Part, Runner
from protocol.tree import TokenTree

#: an idle verifier says nothing for hours; a rank that died is found by torchrun
IDLE = timedelta(days=365)
#: [base, past, chain, tree tokens, tree parents, wanted]
WirePart = tuple[int, int, list[int], list[int], list[int], bool]


class Forward(msgspec.Struct, array_like=True, tag=1):
    parts: list[WirePart]


class Move(msgspec.Struct, array_like=True, tag=2):
    sources: list[int]
    targets: list[int]


class Gather(msgspec.Struct, array_like=True, tag=3):
    layers: list[int]
    rows: list[int]


class Stop(msgspec.Struct, array_like=True, tag=4):
    pass


Command = Forward | Move | Gather | Stop
_decoder = msgspec.msgpack.Decoder(Command)


class Ranks:
    """The ranks' two groups: torch's default one for tensors, a gloo one for commands."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=IDLE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._commands = dist.new_group(backend="gloo", timeout=IDLE)

    def send(self, command: Command) -> None:
        """From rank 0 to all others."""
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(command)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._commands)
        dist.broadcast(data, 0, group=self._commands)

    def receive(self) -> Command:
        """On every other rank: wait for the next command."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._commands)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._commands)
        return _decoder.decode(data.numpy().tobytes())

    def all_heads(self, own: Tensor) -> Tensor:
        """Join [rows, layers, own heads' values] of all ranks along the last axis, in rank order."""
        own = own.contiguous()
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)
        return torch.cat(every, -1)


class Leader:
    """Rank 0's `cloud.runner.Runs`: does everything on all ranks."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks

    def forward(self, parts: Sequence[Part]) -> Tensor:
        """See Runs.forward. transformers joins the logits, so rank 0 has them whole."""
        self._ranks.send(
            Forward(
                [(p.base, p.past, list(p.chain), list(p.tree.tokens), list(p.tree.parents), p.wanted) for p in parts]
            )
        )
        return self._runner.forward(parts)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Runs.move."""
        self._ranks.send(Move(list(sources), list(targets)))
        self._runner.move(sources, targets)

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """See Runs.gather."""
        self._ranks.send(Gather(list(layers), list(rows)))
        return self._ranks.all_heads(self._runner.gather(layers, rows))

    def stop(self) -> None:
        """End the others' loops."""
        self._ranks.send(Stop())


def follow(runner: Runner, ranks: Ranks) -> None:
    """What ranks 1.. do until rank 0 stops: the same calls in the same order."""
    while True:
        command: Any = ranks.receive()
        match command:
            case Forward():
                runner.forward(
                    [
                        Part(base, past, tuple(chain), TokenTree(tuple(tokens), tuple(parents)), wanted)
                        for base, past, chain, tokens, parents, wanted in command.parts
                    ]
                )
            case Move():
                runner.move(command.sources, command.targets)
            case Gather():
                ranks.all_heads(runner.gather(command.layers, command.rows))
            case Stop():
                return
