"""Tensor parallelism inside one verifier: rank 0 decides, the others repeat what it does.

Start it with torchrun, one process per device; where rank 0 was started by something else, `Followers` starts the
others. transformers shards the target's weights; each rank keeps the keys and values of its own KV heads. Rank 0
serves. It sends each command to the others before it runs it, over a gloo group of its own, so that small messages
never wait for the device. Commands are MessagePack, never pickle. A step takes one: it says which rows to move first,
what to run, and of which layers all ranks then join the new keys and values, from which rank 0 makes feature rows.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cloud.settings import Settings
from cloud.torch_engine.drawing import TorchLogits
from cloud.torch_engine.process import free_port
from cloud.torch_engine.runner import TorchRunner
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.part import Part

#: no timeout: an idle verifier sends nothing for hours, and torchrun notices ranks that die
IDLE = timedelta(days=365)
#: [base, past, chain, tree tokens, tree parents, wanted]
WirePart = tuple[int, int, list[int], list[int], list[int], bool]
#: pool rows: (sources, targets)
Move = tuple[list[int], list[int]]
#: bytes of a command that one broadcast carries; longer ones take another for the rest
FRAME = 4096


class Forward(msgspec.Struct, array_like=True, tag=1):
    """Move rows, run the parts, then join the written rows of `layers`."""

    moves: list[Move]
    parts: list[WirePart]
    layers: list[int]


class Gather(msgspec.Struct, array_like=True, tag=2):
    """Move rows, then join `rows` of `layers`."""

    moves: list[Move]
    layers: list[int]
    rows: list[int]


class Stop(msgspec.Struct, array_like=True, tag=3):
    pass


Command = Forward | Gather | Stop
_decoder = msgspec.msgpack.Decoder(Command)
_SIZE = 4  # bytes that tell a command's length


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
        data = msgspec.msgpack.encode(command)
        frame = bytearray(FRAME)
        frame[:_SIZE] = len(data).to_bytes(_SIZE, "little")
        head = data[: FRAME - _SIZE]
        frame[_SIZE : _SIZE + len(head)] = head
        self._broadcast(frame)
        if rest := data[len(head) :]:
            self._broadcast(bytearray(rest))

    def receive(self) -> Command:
        """On every other rank: wait for the next command."""
        frame = self._broadcast(bytearray(FRAME))
        size = int.from_bytes(frame[:_SIZE], "little")
        data = bytes(frame[_SIZE : _SIZE + size])
        if size > len(data):
            data += self._broadcast(bytearray(size - len(data)))
        return _decoder.decode(data)

    def _broadcast(self, data: bytearray) -> bytearray:
        """Rank 0's `data`, on every rank in its own `data`."""
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._commands)
        return data

    def all_heads(self, own: Tensor) -> Tensor:
        """Join [rows, layers, own heads' values] of all ranks along the last axis, in rank order."""
        own = own.contiguous()
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)
        return torch.cat(every, -1)


def forward(runner: TorchRunner, ranks: Ranks, command: Forward, parts: Sequence[Part]) -> tuple[TorchLogits, Tensor]:
    """What every rank does at this command, whose parts are `parts`.

    Returns the logits and the written rows of all heads, parts in order.
    """
    _move(runner, command.moves)
    logits = runner.forward(parts)
    return logits, ranks.all_heads(runner.gather(command.layers, written(parts)))


def gather(runner: TorchRunner, ranks: Ranks, command: Gather) -> Tensor:
    """What every rank does at this command. Returns the rows of all heads."""
    _move(runner, command.moves)
    return ranks.all_heads(runner.gather(command.layers, command.rows))


def _move(runner: TorchRunner, moves: Sequence[Move]) -> None:
    for sources, targets in moves:
        runner.move(sources, targets)


def written(parts: Sequence[Part]) -> list[int]:
    """The pool rows that these parts write, in order."""
    return [part.base + part.past + each for part in parts for each in range(len(part))]


class Leader:
    """Rank 0's `ModelRunner`: runs every call on all ranks. layers: that feature rows are made from.

    A move is not sent: it goes with the next command. Keys and values that the last step wrote are here already, with
    all heads, so that a step's feature rows take no command of their own.
    """

    def __init__(self, runner: TorchRunner, ranks: Ranks, layers: Sequence[int]) -> None:
        self._runner, self._ranks, self._layers = runner, ranks, list(layers)
        self._moves: list[Move] = []
        self._fresh: dict[int, int] = {}  # pool row -> row of `_joined`
        self._joined = torch.empty(0)

    def forward(self, parts: Sequence[Part]) -> TorchLogits:
        """See ModelRunner.forward. transformers joins the logits, so rank 0 has all of them."""
        command = Forward(
            self._taken_moves(),
            [(p.base, p.past, list(p.chain), list(p.tree.tokens), list(p.tree.parents), p.wanted) for p in parts],
            self._layers,
        )
        self._ranks.send(command)
        logits, self._joined = forward(self._runner, self._ranks, command, parts)
        self._fresh = {row: index for index, row in enumerate(written(parts))}
        return logits

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ModelRunner.move."""
        if not sources:
            return
        self._moves.append((list(sources), list(targets)))
        for target, index in zip(targets, [self._fresh.get(source) for source in sources], strict=True):
            if index is None:
                self._fresh.pop(target, None)
            else:
                self._fresh[target] = index

    def gather(self, layers: Sequence[int], rows: Sequence[int]) -> Tensor:
        """See ModelRunner.gather."""
        fresh = [self._fresh.get(row, -1) for row in rows]
        if list(layers) == self._layers and -1 not in fresh:
            return self._joined[torch.tensor(fresh, dtype=torch.int64, device=self._joined.device)]
        command = Gather(self._taken_moves(), list(layers), list(rows))
        self._ranks.send(command)
        return gather(self._runner, self._ranks, command)

    def rest(self) -> None:
        """See ModelRunner.rest; torch keeps its memory."""

    def stop(self) -> None:
        """End the others' loops."""
        self._ranks.send(Stop())

    def _taken_moves(self) -> list[Move]:
        moves, self._moves = self._moves, []
        return moves


def follow(runner: TorchRunner, ranks: Ranks) -> None:
    """Repeat rank 0's calls in their order until it stops; for ranks 1 and up."""
    while True:
        match ranks.receive():
            case Forward() as command:
                parts = [
                    Part(base, past, tuple(chain), TokenTree(tuple(tokens), tuple(parents)), wanted)
                    for base, past, chain, tokens, parents, wanted in command.parts
                ]
                forward(runner, ranks, command, parts)
            case Gather() as command:
                gather(runner, ranks, command)
            case Stop():
                return


class Followers:
    """Makes this process rank 0 and starts ranks 1.. of a tensor-parallel verifier beside it, on the same machine.

    For a process that torchrun has not started, such as a replica of Ray Serve. As under torchrun, a rank that fails
    ends all of them: this process exits with status 1. When this process ends, the others lose their connection and
    end too.
    """

    def __init__(self, settings: Settings) -> None:
        group = {
            "WORLD_SIZE": str(settings.tensor_parallel_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self._ended = False
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, settings.tensor_parallel_size):
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
