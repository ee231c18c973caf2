"""Tensor parallelism inside one verifier: rank 0 decides, the others repeat what it does.

Start it with torchrun, one process per device; where rank 0 was started by something else, `Followers` starts the
others. transformers shards the target's weights; each rank keeps the keys and values of its own KV heads. Rank 0
serves. It sends each command to the others before it runs it, over a gloo group of its own, so that small messages
never wait for the device. Commands are MessagePack, never pickle.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cloud.process import free_port
from cloud.settings import Settings
from cloud.torch_engine.drawing import TorchLogits
from cloud.torch_engine.runner import TorchRunner
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.part import Part

#: no timeout: an idle verifier sends nothing for hours, and torchrun notices ranks that die
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
            atexit.register(dist.destroy_process_group)  # threads of gloo that outlive Python abort the process
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
    """Rank 0's `cloud.runner.ModelRunner`: runs every call on all ranks."""

    def __init__(self, runner: TorchRunner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks

    def forward(self, parts: Sequence[Part]) -> TorchLogits:
        """See ModelRunner.forward. transformers joins the logits, so rank 0 has all of them."""
        self._ranks.send(
            Forward(
                [(p.base, p.past, list(p.chain), list(p.tree.tokens), list(p.tree.parents), p.wanted) for p in parts]
            )
        )
        return self._runner.forward(parts)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner.move."""
        self._ranks.send(Move(list(sources), list(targets)))
        self._runner.move(sources, targets)

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """See ModelRunner.gather."""
        self._ranks.send(Gather(list(layers), list(rows)))
        return self._ranks.all_heads(self._runner.gather(layers, rows))

    def rest(self) -> None:
        """See ModelRunner.rest; torch keeps its memory."""

    def stop(self) -> None:
        """End the others' loops."""
        self._ranks.send(Stop())


def follow(runner: TorchRunner, ranks: Ranks) -> None:
    """Repeat rank 0's calls in their order until it stops; for ranks 1 and up."""
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


class Followers:
    """Makes this process rank 0 and starts ranks 1.. of a tensor-parallel verifier beside it, on the same machine.

    For a process that torchrun has not started, such as a replica of Ray Serve. As under torchrun, a rank that fails
    ends all of them: this process exits with status 1. When this process ends, the others lose their connection and
    end too.
    """

    def __init__(self, settings: Settings) -> None:
        group = {"WORLD_SIZE": str(settings.tp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._ended = False
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, settings.tp):
            environment = os.environ | settings.as_environment() | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "cloud.verifier"]
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()
        os.environ.update(group | {"RANK": "0", "LOCAL_RANK": "0"})

    def kill(self) -> None:
        """End them at once."""
        self._ended = True
        for process in self._processes:
            process.kill()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait() != 0 and not self._ended:
            self.kill()
            os._exit(1)
