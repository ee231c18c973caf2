"""The target's features of its own text: K and V of chosen layers, and the last hidden state.

They are either computed for each batch (`OnlineFeatures`: on a GPU that costs less than reading them), or once per text
and kept in a file (`FeatureCache`), so that later epochs, stages and runs need no forward pass of the target.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.target import Target
from outrider_core.protocol.rows import LEAST_DIVISOR

#: bytes after each row
CHECK_BYTES = 4

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sequence:
    """A conversation: all its token ids, and [begin, end) of each of the target's answers in them.

    alone: where the link was cut, if the drafter wrote the rest; rows from there on must not be seen.
    """

    ids: list[int]
    answers: Spans
    alone: int = 0

    @property
    def answered(self) -> int:
        return sum(end - begin for begin, end in self.answers)


class OnlineFeatures:
    """Features of `sequences`, computed on demand."""

    def __init__(self, target: Target, config: MoAConfig, sequences: Seq[Sequence]) -> None:
        self.target, self.config, self.sequences = target, config, sequences

    @torch.no_grad()
    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return (kv [B, S, layers, kv_width] for outrider_core.models.moa.ServerHalf, hidden [B, S, hidden_size]).

        On the target's device in its dtype; values after a sequence's end are meaningless. hidden is the last hidden
        state after the final norm, the input of the LM head.
        """
        model = self.target.model
        texts = [torch.tensor(self.sequences[index].ids) for index in indices]
        tokens = sent(pad_sequence(texts, batch_first=True), model.device)  # causal: padding changes nothing before it
        cache = DynamicCache()  # of all tokens, also in layers with a sliding window
        hidden = model.model(tokens, cache=cache, use_cache=True).last_hidden_state
        layers = [cache.layers[layer] for layer in self.config.target_layers]
        kv = [torch.stack([layer.keys, layer.values], 2).permute(0, 3, 1, 2, 4).flatten(2) for layer in layers]
        return torch.stack(kv, 2), hidden


class FeatureCache(OnlineFeatures):
    """The same, kept in a folder: one file for each text, so that every stage and every later run finds it again.

    A token's row: K and V as int8 with one float16 scale per head, the hidden state in float16, and a CRC-32 of these;
    a file that a crash has damaged is made again. All are of one target in one dtype. Raises OSError if the disk has no
    room for the missing ones.
    """

    def __init__(self, target: Target, config: MoAConfig, sequences: Seq[Sequence], folder: Path) -> None:
        super().__init__(target, config, sequences)
        self._values = len(config.target_layers) * config.kv_width
        self._groups = self._values // config.target_head_dim
        self._width = row_bytes(config)
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / f"{_name(sequence.ids)}.u8" for sequence in sequences]
        there = {file.name: file.stat().st_size for file in os.scandir(folder)}
        sizes = {file.name: len(s.ids) * self._width for file, s in zip(self.files, sequences, strict=True)}
        _check_room(folder, sum(size for name, size in sizes.items() if there.get(name) != size))

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """See OnlineFeatures.batch; on the CPU, float32 and float16."""
        parts = [self._one(index) for index in indices]
        return (
            pad_sequence([kv for kv, _ in parts], batch_first=True),
            pad_sequence([hidden for _, hidden in parts], batch_first=True),
        )

    def _one(self, index: int) -> tuple[Tensor, Tensor]:
        file = self.files[index]
        content = np.frombuffer(file.read_bytes() if file.is_file() else b"", np.uint8)
        count = len(self.sequences[index].ids)
        rows = content.reshape(-1, self._width) if len(content) == count * self._width else None
        if rows is None or not np.array_equal(rows[:, -CHECK_BYTES:], _checks(rows[:, :-CHECK_BYTES])):
            kv, hidden = super().batch([index])
            rows = self._pack(kv[0].float().cpu().numpy(), hidden[0].float().cpu().numpy())
            aside = file.with_suffix(f".{os.getpid()}")
            try:
                aside.write_bytes(rows.tobytes())
                aside.rename(file)
            finally:
                aside.unlink(missing_ok=True)
        return self._unpack(rows)

    def _pack(self, kv: NDArray[np.float32], hidden: NDArray[np.float32]) -> NDArray[np.uint8]:
        groups = kv.reshape(len(kv), self._groups, -1)
        scales = (np.abs(groups).max(-1) / 127).astype(np.float16)
        divisor = np.maximum(scales.astype(np.float32), LEAST_DIVISOR)[..., None]
        values = np.clip(np.rint(groups / divisor), -127, 127).astype(np.int8)
        halves = np.clip(hidden, -65504, 65504).astype(np.float16)
        row = np.concatenate([x.reshape(len(kv), -1).view(np.uint8) for x in (values, scales, halves)], 1)
        return np.concatenate([row, _checks(row)], 1)

    def _unpack(self, rows: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        cuts = np.cumsum([self._values, 2 * self._groups])
        values, scales, halves = (np.ascontiguousarray(part) for part in np.split(rows[:, :-CHECK_BYTES], cuts, 1))
        groups = values.view(np.int8).reshape(len(rows), self._groups, -1)
        kv = groups * scales.view(np.float16).astype(np.float32)[..., None]
        shape = (len(rows), len(self.config.target_layers), self.config.kv_width)
        return torch.from_numpy(kv).reshape(shape), torch.from_numpy(halves.view(np.float16))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device`, without waiting for a GPU's pending work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def row_bytes(config: MoAConfig) -> int:
    """Return the bytes of a token in a FeatureCache."""
    values = len(config.target_layers) * config.kv_width
    return values + 2 * values // config.target_head_dim + 2 * config.hidden_size + CHECK_BYTES


def _checks(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the CRC-32 of each row, [n, CHECK_BYTES]."""
    return np.array([[zlib.crc32(row)] for row in np.ascontiguousarray(rows)], "<u4").view(np.uint8)


def _name(ids: list[int]) -> str:
    return hashlib.sha256(np.array(ids, np.int64).tobytes()).hexdigest()[:24]


def _check_room(folder: Path, size: int) -> None:
    """Raise OSError if the disk would be full, which after hours would be a poor surprise."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(
            f"{folder} has {free / 1e9:.1f} GB free, the target's features take {size / 1e9:.1f} more; give another "
            "--work-dir, or --features online, which computes them again for every batch"
        )
