"""Text that a drafter writes alone, as training text: the last stage of training.

Offline the drafter reads its own words, which the target would have put otherwise. It is trained on the target's own
continuations only, so it never learns to continue from there. Here it writes on from inside the target's answers, the
target reads that, and the drafter learns what the target would say next (DAgger, arXiv 1011.0686; in EAGLE-3, arXiv
2503.01840, "training-time test").
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor

from export.train.answers import append_to, read_answers
from export.train.batches import MASKED, row_mask_of
from export.train.features import OnlineFeatures, Sequence
from outrider_core.models.moa import DeviceHalf, MoA

#: texts at a time; more make a CPU no faster
AT_ONCE_CPU, AT_ONCE_GPU = 16, 128
#: most tokens of them all, with padding, that a layer of the target computes at once
AT_ONCE_TOKENS = 65536


@torch.no_grad()
def continue_alone(moa: MoA, features: OnlineFeatures, indices: Seq[int], length: int) -> list[Sequence]:
    """Return each of the sequences `indices` up to where the drafter fails, and up to `length` of its own tokens.

    It fails where its first choice, with the rows of all tokens before the newest, differs from the target's token. One
    of these places in the last answer is drawn, any place if there is none. From there it writes greedily, sees no
    further rows, and stops when it ends its turn.
    """
    half, device, room = moa.device_half, moa.device_half.draft_ids.device, moa.config.max_context
    texts = [features.sequences[index] for index in indices]
    kv, _ = features.batch(list(indices))
    count, size = kv.shape[:2]
    tokens = torch.zeros(count, size, dtype=torch.long, device=device)
    for b, text in enumerate(texts):
        tokens[b, : len(text.ids)] = torch.tensor(text.ids)
    positions = torch.arange(size, device=device)
    rows = moa.server(kv.to(device).float().flatten(0, 1), positions.repeat(count)).unflatten(0, (count, size))
    assert half.null_row is not None, "drafters are trained with a null row"
    keys, values = torch.cat([half.null_row.expand(count, 1, -1, -1, -1), rows], 1).unbind(2)
    causal = torch.full((size, size), MASKED, device=device).triu(1)
    newest = row_mask_of(size, 1, 0)[0].to(device)  # every token is a root
    none = rows.new_zeros(count, 0, half.cache_heads, moa.config.head_dim)
    state, sa_keys, sa_values = half.hidden(
        tokens, positions.expand(count, -1), causal[None], none, none, keys, values, newest[None]
    )  # fmt: skip

    each_text = enumerate(zip(indices, texts, strict=True))
    roots = [_root(half, state[b], text, index, room) for b, (index, text) in each_text]
    at, each = torch.tensor(roots, device=device), torch.arange(count, device=device)
    chosen = _first_choice(half, state[each, at])
    own, mask, visible = [chosen], causal[at], newest[at][:, None]
    for step in range(1, length):
        mask = torch.cat([mask, mask.new_zeros(count, 1)], 1)
        state, key, value = half.hidden(
            chosen[:, None], at[:, None] + step, mask[:, None], sa_keys, sa_values, keys, values, visible
        )  # fmt: skip
        sa_keys, sa_values = torch.cat([sa_keys, key], 1), torch.cat([sa_values, value], 1)
        chosen = _first_choice(half, state[:, 0])
        own.append(chosen)
    written = torch.stack(own, 1).tolist()
    return [
        _cut_off(text.ids[: root + 1], ids, features.target.eos_ids, room)
        for text, root, ids in zip(texts, roots, written, strict=True)
    ]


def _first_choice(half: DeviceHalf, state: Tensor) -> Tensor:
    """Return the target's ids [...] of the likeliest tokens after states [..., hidden_size]."""
    return half.draft_ids[half.head(state).argmax(-1)].long()


def _root(half: DeviceHalf, state: Tensor, text: Sequence, index: int, room: int) -> int:
    """Return the position of the last verified token, before a token of the answer that the drafter does not predict.

    room: positions of the device. If the answer begins after them, it is the last that leaves room for a token.
    """
    begin, end = text.answers[-1]
    first = min(begin - 1, room - 2)
    places = range(first, max(first + 1, min(end - 1, room - 1)))
    foreseen = _first_choice(half, state[places.start : places.stop]).tolist()
    failed = [place for place, token in zip(places, foreseen, strict=True) if text.ids[place + 1] != token]
    return random.Random(index).choice(failed or places)


def _cut_off(verified: list[int], own: list[int], ends: tuple[int, ...], room: int) -> Sequence:
    last = next((at for at, token in enumerate(own) if token in ends), len(own))
    ids = [*verified, *own[: last + 1]][:room]
    return Sequence(ids, ((len(verified), len(ids)),), len(verified))


def write_alone(
    moa: MoA, features: OnlineFeatures, indices: Seq[int], length: int, path: Path, on_end: Callable[[int], None]
) -> list[Sequence]:
    """Write one continuation for each of the sequences `indices`, except those in the JSONL file `path`.

    on_end: called with the number of finished texts.
    """
    done = {row["index"]: row for row in read_answers(path) if row["index"] in set(indices)}
    moa.eval()
    at_once = AT_ONCE_CPU if features.target.model.device.type == "cpu" else AT_ONCE_GPU
    left = sorted((i for i in indices if i not in done), key=lambda i: len(features.sequences[i].ids))  # little padding
    with append_to(path) as file:
        while left:
            on_end(len(done))
            longest = len(features.sequences[left[min(at_once, len(left)) - 1]].ids)
            count = max(1, min(at_once, AT_ONCE_TOKENS // longest))
            some, left = left[:count], left[count:]
            for index, own in zip(some, continue_alone(moa, features, some, length), strict=True):
                done[index] = {"index": index, "ids": own.ids, "alone": own.alone}
                file.write(json.dumps(done[index], separators=(",", ":")) + "\n")
            file.flush()
    on_end(len(done))
    rows = [done[index] for index in indices]
    return [Sequence(row["ids"], ((row["alone"], len(row["ids"])),), row["alone"]) for row in rows]
