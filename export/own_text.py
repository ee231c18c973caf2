"""What a drafter writes alone, as text to learn from: the last stage of training.

Offline the drafter reads its own words, which the target would have put otherwise. It is trained on the target's own
continuations only, so it never learns to go on from there. Here it writes on from inside the target's answers, the
target reads that, and the drafter learns what the target would say next (DAgger, arXiv 1011.0686; in EAGLE-3,
arXiv 2503.01840, "training-time test").
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch

from export.answers import read_answers
from export.features import OnlineFeatures, Sequence
from outrider_core.drafting.drafter import Drafter
from outrider_core.models.eager import EagerEngine
from outrider_core.models.moa import MoA
from outrider_core.protocol.rows import RowShape, pack_rows, unpack_rows
from outrider_core.protocol.sampling import Sampling

GREEDY = Sampling()


@torch.no_grad()
def continue_alone(moa: MoA, features: OnlineFeatures, index: int, cut: int, length: int) -> Sequence:
    """Sequence `index` up to `cut`, and `length` tokens that the drafter writes behind it with the rows before it."""
    config, half = moa.config, moa.device_half
    shape = RowShape(config.ca_kv_heads, config.head_dim)
    null_row = None if half.null_row is None else half.null_row.float().cpu().numpy()
    ids = half.draft_ids.cpu().numpy().astype(np.int64)
    drafter = Drafter(EagerEngine(half), ids, shape, config.sa_kv_heads, config.max_context, False, null_row)
    kv, _ = features.batch([index])
    positions = torch.arange(cut - 1, device=half.draft_ids.device)
    rows = moa.server(kv[0, : cut - 1].to(positions.device).float(), positions).float().cpu().numpy()
    drafter.add_rows(np.arange(cut - 1), unpack_rows(pack_rows(rows), shape))
    text = features.sequences[index].ids[:cut]
    for _ in range(min(length, config.max_context - cut)):
        text.append(drafter.next_token(text, GREEDY)[0])
    return Sequence(text, ((cut, len(text)),), cut)


def write_alone(
    moa: MoA, features: OnlineFeatures, indices: Seq[int], length: int, path: Path, on_end: Callable[[int], None]
) -> list[Sequence]:
    """One continuation for each of the sequences `indices`; those in the JSONL file `path` are not written again."""
    done = {row["index"]: row for row in read_answers(path)}
    moa.eval()
    with path.open("a", encoding="utf-8") as file:
        for index in indices:
            if index not in done:
                begin, end = features.sequences[index].answers[-1]
                cut = random.Random(index).randint(begin + 1, max(begin + 1, end - 1))
                alone = continue_alone(moa, features, index, cut, length)
                done[index] = {"index": index, "ids": alone.ids, "alone": cut}
                file.write(json.dumps(done[index], separators=(",", ":")) + "\n")
                file.flush()
            on_end(length)
    rows = [done[index] for index in indices]
    return [Sequence(row["ids"], ((row["alone"], len(row["ids"])),), row["alone"]) for row in rows]
