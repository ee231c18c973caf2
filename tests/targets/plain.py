"""The oracle of the 8-bit engine: its own target, token by token, alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider_core.protocol.sampling import Sampling, draw
from outrider_core.targets.bundle import TargetBundle
from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.convert import make_target_bundle
from outrider_core.targets.part import Part
from outrider_core.targets.products import check_products, rows_graph
from outrider_core.targets.runner import OnnxRunner
from outrider_core.targets.source import TargetSource


def plain_decode_8bit(
    bundle: TargetBundle, prompt: Sequence[int], sampling: Sampling, max_new: int, eos_ids: Iterable[int] = ()
) -> list[int]:
    """New tokens of plain decoding: every token of prompt and answer is a step of its own, in a pool of its own."""
    rows, stop = -(-(len(prompt) + max_new) // 64) * 64, set(eos_ids)
    runner = OnnxRunner.of(bundle, rows, 1)
    tokens = list(prompt)
    for at in range(len(prompt) + max_new - 1):
        logits = runner.forward([Part(0, at, (tokens[at],))])
        if at + 1 >= len(prompt):
            tokens.append(draw(logits[0], sampling, at + 1))
            if tokens[-1] in stop:
                break
    return tokens[len(prompt) :]


def skip_unless_exact(bits: int) -> None:
    """Skip the test where this machine's kernels cannot run bundles of so many bits; a verifier refuses them there."""
    if why := _inexact(bits):
        pytest.skip(why)


@cache
def _inexact(bits: int) -> str:
    if bits != 8:
        try:
            check_products(rows_graph(bits))
        except UnsupportedTarget as error:
            return str(error)
    return ""


@dataclass(frozen=True)
class TinySource(TargetSource):
    """With the identity that tests greet verifiers with. ends: ids that end an answer."""

    ends: tuple[int, ...] = ()

    @property
    def identity(self) -> str:
        return "tiny-target"

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.ends


def lowered(model: Any, folder: Path, eos_ids: Iterable[int] = (), max_context: int = 256) -> TargetBundle:
    """A tiny model with its tokenizer as the 8-bit bundle that a verifier makes of it."""
    from tests.tiny import tiny_tokenizer  # torch, which the oracle does without

    source = folder / "source"
    model.save_pretrained(source)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(source)
    place = folder / "bundle"
    return make_target_bundle(TinySource("tiny", source, ends=tuple(eos_ids)), place, max_context)


def tiny_truth(
    model: Any, prompt: Sequence[int], sampling: Sampling, max_new: int, eos_ids: Iterable[int] = ()
) -> list[int]:
    """What a verifier of this tiny model answers on the CPU, in as many tokens."""
    ends = tuple(eos_ids)
    with tempfile.TemporaryDirectory() as folder:
        made = lowered(model, Path(folder), ends)
        return plain_decode_8bit(made, prompt, sampling, max_new, ends)
