"""A token's logits are the same bits in any step, whatever is computed with it and wherever its rows lie."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets.config import UnsupportedTarget
from tests.targets.plain import skip_unless_exact
from tests.targets.pool import Pool
from tests.tiny import FAMILIES, VARIANTS, tiny_model

#: family, heads, KV heads, bits of the weights
Shape = tuple[str, int, int, int]
SHAPES: list[Shape] = [
    *((family, 4, 2, 8) for family in FAMILIES), ("llama", 4, 4, 8), ("llama", 6, 1, 8),
    ("qwen3", 4, 2, 4), ("llama", 6, 1, 4), ("qwen2", 4, 2, 32), ("llama", 4, 4, 32), ("llama", 6, 1, 32),
    *((family, 4, 2, bits) for family in VARIANTS for bits in (8, 32)),
]  # fmt: skip
#: the other formats of the rest sum by the same operators
QUICK = {("qwen3", 4, 2, 4), ("qwen2", 4, 2, 32), *(shape for shape in SHAPES if shape[1:] == (4, 2, 8))}
SOME_SLOW = [pytest.param(shape, marks=() if shape in QUICK else pytest.mark.slow) for shape in SHAPES]


class Pools(dict[Shape, Pool]):
    """Each is made when it is first needed."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, shape: Shape) -> Pool:
        family, heads, kv_heads, bits = shape
        model = tiny_model(family, heads=heads, kv_heads=kv_heads, hidden=48 if heads == 6 else 64, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 2.0)
        self[shape] = pool = Pool(model, self._folder("pool"), bits=bits)
        pool.reference = model  # type: ignore[attr-defined]
        return pool


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Pools:
    return Pools(tmp_path_factory.mktemp)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_follow_the_model(pools: Pools, shape: Shape) -> None:
    """Few bits leave the logits of the float model, up to their noise; float32 is that model."""
    skip_unless_exact(shape[-1])
    pool, ids = pools[shape], list(range(5, 45))
    ours = pool.chain(ids, [], range(40))
    theirs = pool.reference(torch.tensor([ids])).logits[0].numpy()  # type: ignore[attr-defined]
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in zip(ours, theirs, strict=True)]
    if shape[-1] == 32:
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(np.abs(theirs).max()))
    else:
        middle, least = (0.995, 0.95) if shape[-1] == 8 else (0.8, 0.0)
        assert np.median(correlation) > middle and min(correlation) > least


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    count = draw(st.integers(1, 20))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    tokens = draw(st.lists(st.integers(4, 198), min_size=count, max_size=count, unique=True))
    return TokenTree(tuple(tokens), tuple(ROOT if parent < 0 else parent for parent in parents))


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("shape", SOME_SLOW, ids=str)
def test_bits_do_not_depend_on_the_step(pools: Pools, shape: Shape, data: st.DataObject) -> None:
    """Any chunks of prefill, any rows, a tree beside single tokens: every logit is equal."""
    skip_unless_exact(shape[-1])
    pool = pools[shape]
    prompt = data.draw(st.lists(st.integers(4, 198), min_size=1, max_size=60))
    tree = data.draw(trees())
    rows = data.draw(st.permutations(range(128)))
    # the prompt token by token, then every path of the tree token by token
    alone = np.concatenate([pool.chain([token], range(at), [at]) for at, token in enumerate(prompt)])
    nodes = {}
    for node in range(len(tree)):
        path, at = list[int](), node
        while at != ROOT:
            path.insert(0, at)
            at = tree.parents[at]
        for depth, each in enumerate(path):
            past = range(len(prompt) + depth)
            nodes[each] = pool.chain([tree.tokens[each]], past, [len(prompt) + depth])[0]
    # the prompt in chunks and the tree at once, in other rows
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, len(prompt)), max_size=3))), len(prompt)]
    chunks = [
        pool.chain(prompt[begin:end], rows[:begin], rows[begin:end]) for begin, end in pairwise(cuts) if end > begin
    ]
    np.testing.assert_array_equal(np.concatenate(chunks), alone)
    together = pool.tree(tree, rows[: len(prompt)], rows[len(prompt) : len(prompt) + len(tree)])
    np.testing.assert_array_equal(together, np.stack([nodes[node] for node in range(len(tree))]))


@pytest.mark.parametrize("scale", [1e6, 1e-4, 1e-7])
def test_embeddings_beyond_16_bits_are_refused(tmp_path: Path, scale: float) -> None:
    """Infinities or zeros would be served, or answers of another model."""
    model = tiny_model(dtype=torch.float32)
    model.get_input_embeddings().weight.mul_(scale)
    with pytest.raises(UnsupportedTarget, match="embeddings lie beyond the range of 16 bits"):
        Pool(model, tmp_path)
