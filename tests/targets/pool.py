"""A lowered tiny target with one session's blocks of KV pool, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.targets.batch import BlockRange, routes, slots
from outrider_core.targets.graph import TargetGraph
from outrider_core.targets.part import POOL_BLOCK
from outrider_core.targets.products import open_session
from outrider_core.targets.tables import TableFile
from outrider_core.targets.weights import folder_weights

Floats = NDArray[np.float32]


class Pool:
    """Rows of the pool are given out in any order that a caller likes."""

    def __init__(self, model: Any, folder: Path, blocks: int = 2, bits: int = 8) -> None:
        model.save_pretrained(folder)
        weights, self.config = folder_weights(folder)
        with TableFile(folder) as tables:
            graph = TargetGraph(self.config, weights, 512, tables, bits=bits).build()
        onnx.save(graph, folder / "target.onnx")
        self.session = open_session(str(folder / "target.onnx"), 1)
        shape = (blocks, self.config.num_key_value_heads, POOL_BLOCK, self.config.head_dim)
        self.memory: dict[str, NDArray[Any]] = {}
        for layer in range(self.config.num_hidden_layers):
            self.memory[f"keys_{layer}"] = np.full(shape, 7, np.float32)  # what nobody may read
            self.memory[f"values_{layer}"] = np.full(shape, 7, np.float32)
        self.blocks = blocks
        self.position_of = dict[int, int]()  # of rows that were written

    def run(self, ids: Sequence[int], positions: Sequence[int], rows: Sequence[int], seen: list[list[int]]) -> Floats:
        """Logits [T, vocab]. seen: the rows of the pool that each token attends to, its own among them."""
        mask = np.full((len(ids), self.blocks * POOL_BLOCK), -np.inf, np.float32)
        for token, visible in enumerate(seen):
            mask[token, visible] = 0
        count, whole = len(ids), BlockRange(0, self.blocks)
        masks = {"mask": mask}
        if self.config.windowed_layers:
            self.position_of |= dict(zip(rows, positions, strict=True))
            masks["window_mask"] = mask.copy()
            for token, visible in enumerate(seen):
                far = [row for row in visible if positions[token] - self.position_of[row] >= self.config.sliding_window]
                masks["window_mask"][token, far] = -np.inf
        inputs = {
            "ids": np.array(ids),
            "positions": np.array([positions]),
            **{name: self._tiled(each) for name, each in masks.items()},
            "slots": slots(np.array(rows), self.config),
            "wanted": np.arange(count),
            **routes([count], [whole], self.blocks, self.config),
            **self.memory,
        }
        names = [output.name for output in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(None, inputs), strict=True))
        self.memory = {name: outputs[f"new_{name}"] for name in self.memory}
        logits: Floats = outputs["logits"]
        return logits

    def _tiled(self, mask: Floats) -> Floats:
        """[T, rows of the pool] as the graph takes it."""
        tiled = np.tile(mask, (self.config.group, 1)).reshape(-1, self.blocks, POOL_BLOCK)
        return np.ascontiguousarray(tiled.transpose(1, 0, 2)[:, None])

    def chain(self, ids: Sequence[int], past: Sequence[int], rows: Sequence[int]) -> Floats:
        """Tokens in a row behind those that lie in the rows `past`."""
        seen = [[*past, *rows[: index + 1]] for index in range(len(ids))]
        return self.run(ids, range(len(past), len(past) + len(ids)), rows, seen)

    def tree(self, tree: TokenTree, past: Sequence[int], rows: Sequence[int]) -> Floats:
        """The nodes of a tree below the token in the last of the rows `past`."""
        seen = []
        for node in range(len(tree)):
            path, at = list[int](), node
            while at != ROOT:
                path.append(rows[at])
                at = tree.parents[at]
            seen.append([*past, *path])
        return self.run(tree.tokens, [len(past) - 1 + depth for depth in tree.depths], rows, seen)
