"""Run by torchrun, two ranks: `python -m tests.cloud.ranks FOLDER FAMILY...`, see test_parallel.py.

Rank 0 prints a line of JSON per family: what the tensor-parallel verifier emitted, to compare with plain decoding.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import make_runner, torch_model
from cloud.torch_engine.parallel import Command, Leader, Ranks, follow
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import Verdict
from outrider_core.targets.part import Part
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import in_chunks, random_tree, started
from tests.tiny import tiny_drafter_config
from tests.waiting import HANG

SAMPLINGS = [Sampling(), Sampling(temperature=0.7, seed=1), Sampling(temperature=1.0, top_p=0.9, seed=2)]


class CountedRanks:
    """Ranks that count the commands sent, by name."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.commands = ranks, Counter[str]()

    def send(self, command: Command) -> None:
        self.commands[type(command).__name__] += 1
        self._ranks.send(command)

    def all_heads(self, own: Tensor) -> Tensor:
        return self._ranks.all_heads(own)


def main() -> None:
    torch.set_num_threads(1)
    folder, families = Path(sys.argv[1]), sys.argv[2:]
    ranks = Ranks()
    for family in families:
        settings = Settings(max_model_len=128, max_nodes=24, kv_tokens=256, tensor_parallel_size=2, prefix_cache="on")
        target = load_target(TargetSource.resolve(str(folder / family)), "float64", tp=2)
        runner = make_runner(target, settings)
        if ranks.rank > 0:
            follow(runner, ranks)
            continue
        plain = load_target(TargetSource.resolve(str(folder / family)), "float64").model
        config, tensors = tiny_drafter_config(plain, target.model_hash)
        leader = Leader(runner, counted := CountedRanks(ranks), config.target_layers)
        model = torch_model(target, (config, tensors, "tiny"), settings, leader)
        verifier = in_chunks(Verifier(model, settings), 16)
        truths = json.loads((folder / f"{family}.json").read_text())
        joined = joins_rows(leader, config.target_layers)
        counted.commands.clear()
        found = {"joined": joined, "family": family, "rows": runner.store.keys[0].shape[1], **drive(verifier, truths)}
        print(json.dumps({**found, "commands": counted.commands}), flush=True)


def joins_rows(leader: Leader, layers: tuple[int, ...]) -> bool:
    """Whether rows of the last step, moved ones and those of an earlier step are all found, with every head."""
    leader.forward([Part(0, 0, (5, 6, 7), TokenTree.chain((8, 9)), True)])
    fresh = leader.gather(layers, range(5))
    leader.move([4], [3])
    moved = leader.gather(layers, [3, 0])
    leader.forward([Part(128, 0, (5,), TokenTree(), True)])
    earlier = leader.gather(layers, [128, 3, 1])
    return torch.equal(moved, fresh[[4, 0]]) and torch.equal(earlier[1:], fresh[[4, 1]])


def drive(verifier: Verifier, truths: list[dict[str, Any]]) -> dict[str, Any]:
    """Several sessions in turn, more than the pool holds; their texts, and how often their rows were evicted."""
    rng, evicted, rows = random.Random(0), 0, ""
    with started(verifier) as direct:
        talks = [{"id": os.urandom(16), "tokens": list(t["prompt"]), "seq": 0, **t} for t in truths]
        for talk in talks:
            direct.open(talk["id"], talk["tokens"], 0, SAMPLINGS[talk["sampling"]])
        for _ in range(6):
            waiting = []
            for talk in talks:
                evicted += verifier.engine.pool.used(talk["id"]) == 0
                talk["seq"] += 1
                rest = talk["truth"][len(talk["tokens"]) - len(talk["prompt"]) :]
                tree = random_tree(rng, rest, verifier.vocab_size)
                replies = direct.verify(talk["id"], talk["seq"], len(talk["tokens"]), tree)
                waiting.append((talk, tree, replies))
            for talk, tree, replies in waiting:
                verdict = replies.get(timeout=HANG)
                assert isinstance(verdict, Verdict), verdict
                talk["tokens"] += [tree.tokens[node] for node in verdict.accepted] + [verdict.bonus]
        _, features = direct.open(talks[0]["id"], talks[0]["tokens"], talks[0]["seq"], SAMPLINGS[0])
        rows = features.block(features.start, features.stop).hex()
    shared = verifier.metrics.registry.get_sample_value("outrider:prefix_cache_hits_total")
    return {"texts": [talk["tokens"] for talk in talks], "evicted": evicted, "shared": shared, "features": rows}


if __name__ == "__main__":
    main()
