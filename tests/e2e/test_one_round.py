"""examples/one_round.py writes what plain decoding writes, in fewer forward passes."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider_core.protocol.sampling import Sampling
from tests.tiny import plain_decode, save_tiny_drafter, tiny_model, tiny_target

FILE = Path(__file__).parents[2] / "examples/one_round.py"
MODEL = tiny_model(seed=3)
PROMPT, NEW = [1, 20, 21, 22, 20, 21], 24


@pytest.fixture(scope="module")
def decode() -> Callable[..., Any]:
    """The example's function."""
    return runpy.run_path(str(FILE))["decode"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter of all tokens."""
    folder = tmp_path_factory.mktemp("drafter")
    save_tiny_drafter(folder, MODEL, "tiny-target", torch.arange(199))
    return folder


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=7), Sampling(0.8, top_k=20, top_p=0.9, seed=8)])
def test_the_text_is_the_targets(decode: Callable[..., Any], drafter: Path, sampling: Sampling) -> None:
    new, rounds = decode(tiny_target(MODEL, ()), drafter, PROMPT, sampling, NEW)
    assert new == plain_decode(MODEL, PROMPT, sampling, NEW, ())
    assert rounds < len(new)


def test_an_ending_token_ends_it(decode: Callable[..., Any], drafter: Path) -> None:
    truth = plain_decode(MODEL, PROMPT, Sampling(), NEW, ())
    new, _ = decode(tiny_target(MODEL, (truth[9],)), drafter, PROMPT, Sampling(), NEW)
    assert new == truth[: truth.index(truth[9]) + 1]


def test_a_newcomer_can_read_it_at_once() -> None:
    assert len(FILE.read_text().splitlines()) <= 60
