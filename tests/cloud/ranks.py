"""Run by torchrun, two ranks: `python -m tests.cloud.ranks FOLDER FAMILY...`, see test_parallel.py.

Rank 0 prints a line of JSON per family: what the tensor-parallel verifier emitted, to compare with plain decoding.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from cloud.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import make_runner, torch_model
from cloud.torch_engine.parallel import Leader, Ranks, follow
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Verdict
from tests.cloud.drive import random_tree, started
from tests.tiny import tiny_drafter_config

SAMPLINGS = [Sampling(), Sampling(temperature=0.7, seed=1), Sampling(temperature=1.0, top_p=0.9, seed=2)]


def main() -> None:
    torch.set_num_threads(1)
    folder, families = Path(sys.argv[1]), sys.argv[2:]
    ranks = Ranks()
    for family in families:
        settings = Settings(max_context=128, max_nodes=24, kv_tokens=256, prefill_chunk=16, tp=2)
        target = load_target(str(folder / family), "float64", tp=2)
        runner = make_runner(target, settings)
        if ranks.rank > 0:
            follow(runner, ranks)
            continue
        plain = load_target(str(folder / family), "float64").model
        config, tensors = tiny_drafter_config(plain, target.model_hash)
        verifier = Verifier(torch_model(target, (config, tensors, "tiny"), settings, Leader(runner, ranks)), settings)
        truths = json.loads((folder / f"{family}.json").read_text())
        print(
            json.dumps({"family": family, "rows": runner.store.keys[0].shape[1], **drive(verifier, truths)}), flush=True
        )


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
                verdict = replies.get(timeout=60)
                assert isinstance(verdict, Verdict), verdict
                talk["tokens"] += [tree.tokens[node] for node in verdict.accepted] + [verdict.bonus]
        _, features = direct.open(talks[0]["id"], talks[0]["tokens"], talks[0]["seq"], SAMPLINGS[0])
        rows = features.block(features.start, features.stop).hex()
    return {"texts": [talk["tokens"] for talk in talks], "evicted": evicted, "features": rows}


if __name__ == "__main__":
    main()
