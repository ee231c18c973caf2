"""Rank 0's runner against a runner of one process, and a follower that is sent its commands."""

from __future__ import annotations

import random
from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cloud.torch_engine.parallel import FRAME, Forward, Gather, Leader, Ranks, Stop, follow
from cloud.torch_engine.runner import TorchRunner
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.part import Part
from tests.tiny import tiny_model

ROWS, LAYERS = 12, (0, 1)
MODELS = [tiny_model("llama", seed=5) for _ in range(3)]


class Wire(Ranks):
    """Two ranks without processes: frames wait until the other one reads them. The heads are not shared out."""

    def __init__(self) -> None:
        self.frames = deque[bytes]()
        self.sends = True

    def _broadcast(self, data: bytearray) -> bytearray:
        if self.sends:
            self.frames.append(bytes(data))
            return data
        frame = self.frames.popleft()
        assert len(frame) == len(data)
        return bytearray(frame)

    def all_heads(self, own: Tensor) -> Tensor:
        return own


def runner(index: int) -> TorchRunner:
    config = MODELS[index].config
    head_dim = config.hidden_size // config.num_attention_heads
    return TorchRunner(MODELS[index], ROWS, config.num_key_value_heads, head_dim)


def stores(runner: TorchRunner) -> Tensor:
    return torch.stack([tensor[:ROWS] for tensor in (*runner.store.keys, *runner.store.values)])


def random_part(rng: random.Random, base: int) -> Part:
    chain = tuple(rng.randrange(4, 190) for _ in range(rng.randint(1, 3)))
    return Part(base, rng.randint(0, 1), chain, TokenTree.chain([5] * rng.randint(0, 2)), True)


def test_in_every_order_of_calls() -> None:
    """Moves onto rows of the last step, out of them, in chains and loops; rows of the last step and of others."""
    rng, plain, wire = random.Random(0), runner(0), Wire()
    leader = Leader(runner(1), wire, LAYERS)
    for _ in range(600):
        name, count = rng.choice(["forward", "move", "move", "gather", "gather", "gather"]), rng.randint(1, 3)
        if name == "move":
            sources, targets = (rng.sample(range(ROWS), count) for _ in range(2))
            plain.move(sources, targets)
            leader.move(sources, targets)
        elif name == "gather":
            layers, rows = rng.choice([LAYERS, LAYERS, (1,)]), rng.sample(range(ROWS), count)
            assert torch.equal(plain.gather(layers, rows), leader.gather(layers, rows))
        else:
            parts = [random_part(rng, base) for base in rng.sample([0, 6], rng.randint(1, 2))]
            plain.forward(parts)
            leader.forward(parts)
    leader.move([0], [1])
    leader.gather((0,), [0])  # takes the move along
    plain.move([0], [1])
    leader.move([1, 0], [0, 1])  # which nobody reads any more
    leader.stop()
    wire.sends, other = False, runner(2)
    follow(other, wire)
    assert not wire.frames
    assert torch.equal(stores(plain), stores(other))


@given(st.integers(0, 3 * FRAME))
def test_commands_of_every_length_arrive(count: int) -> None:
    wire = Wire()
    sent = [Forward([([1] * count, [])], [], []), Gather([], [], [70000] * (count // 5)), Stop()]
    for command in sent:
        wire.send(command)
    wire.sends = False
    assert [wire.receive() for _ in sent] == sent and not wire.frames
