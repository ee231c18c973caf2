"""Trees as paths in blocks, without vLLM: a token sees its own prefix alone, and accepted rows come to their places."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cloud.engine.kvpool import KVPool
from cloud.vllm_engine import runner as runner_module
from cloud.vllm_engine.paths import Layout, PathLayout, PathRequest, scratch_blocks
from cloud.vllm_engine.runner import VllmRunner
from cloud.vllm_engine.steps import StepCommand, StepRunner
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.part import Part
from tests.cloud.drive import random_tree

BLOCK, POOL, NODES, VOCAB = 32, 1024, 24, 199
SCRATCH = scratch_blocks(NODES, BLOCK)


class Recorder(StepRunner):
    """In vLLM's place: a slot holds a token, and the "logits" of a row number the text that its token sees.

    remote: keys and values of what a step wrote are reported with it, as by several ranks.
    """

    def __init__(self, remote: bool = False) -> None:
        self.device, self.remote, self._block = torch.device("cpu"), remote, BLOCK
        blocks = 1 + POOL // BLOCK + SCRATCH
        self._caches, self._stale = [torch.full((blocks, 1, BLOCK, 2), -1.0)], set[int]()
        self.texts: dict[tuple[int, ...], int] = {}
        self.batches = self.tokens = self.commands = 0

    def command(self, command: StepCommand) -> tuple[Any, torch.Tensor]:
        self.commands += 1
        logits = self.step(command.operations, command.order, command.depths)
        return logits, self.gather(command.layers, command.slots)

    def _run(self, requests: Sequence[PathRequest], wanted: Sequence[int]) -> torch.Tensor:
        self.batches += 1
        self.tokens += sum(len(each.tokens) for each in requests)
        memory = self._caches[0].view(-1, 2, BLOCK)[:, 0]  # keys come first
        for each in requests:
            if each.copied:
                memory[each.copied[1]] = memory[each.copied[0]]
        for each in requests:
            for slot, token in zip(each.slots(BLOCK).tolist(), each.tokens.tolist(), strict=True):
                memory[slot // BLOCK, slot % BLOCK] = token
        seen = dict[int, tuple[int, ...]]()
        for each in requests:
            whole = memory[each.blocks].flatten().tolist()
            for offset, row in enumerate(each.rows.tolist()):
                text = tuple(int(token) for token in whole[: each.past + offset + 1])
                assert -1 not in text and seen.setdefault(row, text) == text  # one row, one text
        return torch.tensor([[float(self.number(seen[row]))] for row in wanted])

    def number(self, text: tuple[int, ...]) -> int:
        return self.texts.setdefault(text, len(self.texts))


def make_runner(positions: int = 400, scratch: int = SCRATCH, remote: bool = False) -> tuple[Recorder, VllmRunner]:
    recorder = Recorder(remote)
    executor: Any = SimpleNamespace(remote=remote, step=recorder.command)
    return recorder, VllmRunner(executor, PathLayout(BLOCK, 1 + POOL // BLOCK, positions), scratch, [0])


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(("requests", "scratch"), [(256, SCRATCH), (3, SCRATCH), (256, 8)])
def test_rows_see_their_own_path_and_accepted_ones_stay(
    requests: int, scratch: int, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in batches of a few requests, and with so few scratch blocks that rows are settled in between."""
    monkeypatch.setattr(runner_module, "MOST_REQUESTS", requests)
    recorder, runner = make_runner(scratch=scratch, remote=remote)
    pool, rng = KVPool(POOL, runner.move), random.Random(requests)
    texts = {os.urandom(16): [rng.randrange(VOCAB) for _ in range(rng.choice([1, 30, 32, 33, 70]))] for _ in range(6)}
    evicted = moved = 0
    for _ in range(120):
        chosen = rng.sample(list(texts), rng.randrange(1, 5))
        parts, trees = list[Part](), dict[bytes, TokenTree]()
        for name in chosen:
            text = texts[name]
            tree = trees[name] = random_tree(rng, [rng.randrange(VOCAB) for _ in range(6)], VOCAB, NODES)
            assert pool.reserve(name, len(text) + len(tree), {*chosen})
            used = pool.used(name)
            evicted += not used
            parts.append(Part(pool.extent(name).base, used, tuple(text[used:]), tree))
        values = runner.forward(parts).values[:, 0].tolist()
        sources, targets = list[int](), list[int]()
        for name, part in zip(chosen, parts, strict=True):
            text, tree = texts[name], trees[name]
            for node in range(-1, len(tree)):
                path = tuple(tree.tokens[each] for each in tree.path(node))
                assert values.pop(0) == recorder.number((*text, *path))
            accepted = tree.path(rng.randrange(-1, len(tree)))
            first = part.base + len(text)
            steps = [(first + node, first + index) for index, node in enumerate(accepted) if node != index]
            sources += [source for source, _ in steps]
            targets += [target for _, target in steps]
            pool.extent(name).used = len(text) + len(accepted)
            texts[name] = [*text, *(tree.tokens[node] for node in accepted), rng.randrange(VOCAB)]
            if len(texts[name]) > 200:
                pool.release(name)
                texts[name] = texts[name][:9]
        pool.move(sources, targets)
        moved += len(sources)
        for name in chosen:
            extent = pool.extent(name) if pool.used(name) else None
            rows = range(extent.base, extent.base + extent.used) if extent else ()
            if rows:
                assert runner.gather([0], list(rows))[:, 0, 0].tolist() == texts[name][: len(rows)]
    assert evicted > 5 and moved > 5


def test_a_chain_runs_each_token_once_and_copies_nothing() -> None:
    layout = PathLayout(BLOCK, 100, 400).of(Part(128, 40, (5,), TokenTree.chain([7, 8, 9])), 0, 0)
    (request,) = layout.requests
    assert (request.past, request.tokens.tolist(), request.rows.tolist()) == (40, [5, 7, 8, 9], [0, 1, 2, 3])
    assert (request.copied, request.blocks, layout.elsewhere, layout.scratch) == (None, [5, 6], {}, 0)


def test_nodes_past_the_longest_sequence_do_not_run() -> None:
    tree = TokenTree((1, 2, 3, 4), (-1, 0, 1, 0))
    layout = PathLayout(BLOCK, 100, 12).of(Part(0, 9, (5,), tree), 0, 0)
    assert [each.tolist() for each in (request.tokens for request in layout.requests)] == [[5, 1, 2], [5, 1, 4]]
    assert layout.wanted == [0, 1, 2, 0, 3] and layout.depths == [0, 1, 2, 3, 2]
    layout = PathLayout(BLOCK, 100, 10).of(Part(0, 9, (5,), tree), 0, 0)
    assert [request.tokens.tolist() for request in layout.requests] == [[5]] and layout.wanted == [0] * 5


def test_any_tree_fits_the_scratch_blocks() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        count = rng.randrange(1, NODES + 1)
        reach = rng.choice([1, 2, 5, NODES])
        parents = [max(-1, node - rng.randrange(1, reach + 1)) for node in range(count)]
        tree = TokenTree(tuple(range(count)), tuple(parents))
        layout: Layout = PathLayout(BLOCK, 100, 1000).of(Part(0, rng.randrange(64), (5,), tree), 0, 0)
        assert layout.scratch <= scratch_blocks(count, BLOCK) <= SCRATCH
