"""The drafter's trees for an understudy that writes alone: device only, where they make it write faster.

The understudy verifies them itself: it is to the drafter what the target is otherwise, with feature rows from its own
keys and values. So what is true of trees over a link is true here, with a round trip of nothing, and the same
measurements decide (`edge_runtime.pace`, `edge_runtime.controller`): trees, or one token a step. The text is the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from edge_runtime.ahead import Ahead
from edge_runtime.controller import Controller
from edge_runtime.pace import Pace
from edge_runtime.policy import Mode
from edge_runtime.tuning import LARGEST, foreseen
from outrider_core.drafting.bundle import Bundle
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.drafting.engines import Engine
from outrider_core.models.host_features import HostFeatures
from outrider_core.models.moa_config import DrafterError, MoAConfig
from outrider_core.protocol.constraint import Rules
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.understudy import Understudy

#: of a bundle: the server half, which an app may leave out
SERVER_HALF = "encoder.safetensors"
#: nodes of the steps that are timed, and how often each is
TIMED_NODES, TIMES = (0, 4, 8, 16, 32), 2
#: rows computed at a time
ROWS_CHUNK = 128


@dataclass(frozen=True)
class _Step:
    """The understudy's last one, behind the first `base` tokens of a text. draft_seconds: drafting the tree took so
    long."""

    base: int
    tree: TokenTree
    scores: tuple[float, ...]
    seconds: float


class Guesses:
    """Guesses for one understudy. Not thread-safe: its thread calls.

    engine: of the drafter, which another drafter may use at the same time. features: the drafter's server half. mode:
    trees, or a token a step, pinned; None: whichever is faster.
    """

    def __init__(self, bundle: Bundle, engine: Engine, features: HostFeatures, mode: Mode | None = None) -> None:
        manifest = bundle.manifest
        self._features = features
        self._drafter = Drafter(
            engine,
            bundle.draft_ids,
            bundle.row_shape,
            manifest.sa_kv_heads,
            manifest.max_context,
            True,
            bundle.null_row,
            manifest.confidence_temperature,
        )
        self.controller = Controller(Pace(ahead=Ahead(fixed=True)), mode)
        self._text: list[int] = []  # as it was at the last step
        self._rows = 0  # of its first tokens, whose feature rows the drafter holds
        self._begin = -1  # where the answer begins
        self._untold = True  # nothing tells of this answer yet
        self._streamed = 0  # tokens of this answer that were written one a step
        self._asked: tuple[int, TokenTree, tuple[float, ...]] | None = None  # for the step under way
        self._step: _Step | None = None

    def tree(
        self, understudy: Understudy, text: list[int], begin: int, sampling: Sampling, rules: Rules | None
    ) -> TokenTree:
        """What may follow `text`, whose last token is all that the understudy has not read; nothing where that is
        faster. begin: where the answer begins."""
        pace = self.controller.pace
        if pace.curve is None:
            pace.curve = CostCurve(
                tuple(1 + nodes for nodes in TIMED_NODES),
                tuple(min(understudy.time_step(nodes) for _ in range(TIMES)) for nodes in TIMED_NODES),
            )
        mode = self._went_on(text, begin)
        self._asked = len(text), TokenTree(), ()
        if mode is Mode.STREAM:
            self._streamed += 1
            if self.controller.pinned or not pace.compares(self._streamed, first=self._untold):
                return TokenTree()
        began, first = time.monotonic(), self._step is None or not self._step.tree
        self._read_rows(understudy, text)
        shape = TreeShape(min(LARGEST.nodes, pace.worth_drafting()), LARGEST.depth, LARGEST.breadth, pace.gain())
        draft = self._drafter.draft(text, sampling, shape, rules=rules)
        seconds = time.monotonic() - began
        tree = draft.tree.pruned(pace.worth_sending(draft.tree, draft.scores), len(draft.tree))
        pace.drafted(seconds, draft.steps, from_scratch=not first)
        (pace.prepared if first else pace.waited)(seconds)
        self._asked, self._untold = (len(text), tree, draft.scores[: len(tree)]), False
        return tree

    def stepped(self, seconds: float) -> None:
        """The step that was asked about took so long."""
        if self._asked:
            self._step, self._asked = _Step(*self._asked, seconds), None

    def _went_on(self, text: list[int], begin: int) -> Mode:
        """Learn what came of the last step, if `text` goes on behind it; the mode of the next one."""
        same = _common(self._text, text)
        step, self._text = self._step, list(text)
        if same < self._rows:
            self._rows = same
            self._drafter.keep_rows(same)
        goes_on = begin == self._begin and step is not None and same == step.base < len(text)
        if not goes_on or step is None:
            self._begin, self._step, self._untold, self._streamed = begin, None, True, 0
            return self.controller.begin()
        pace = self.controller.pace
        if step.tree:
            path = foreseen(step.tree, text[step.base :]) or []
            pace.verified(step.tree, step.scores, path, step.seconds, step.seconds, 0.0)
        else:
            pace.streamed(step.seconds, step.seconds, overdue=False)
        return self.controller.choose()

    def _read_rows(self, understudy: Understudy, text: Sequence[int]) -> None:
        """The drafter gets the feature rows that it lacks."""
        while self._rows < len(text) - 1:
            positions = range(self._rows, min(self._rows + ROWS_CHUNK, len(text) - 1))
            kv = understudy.gather(self._features.layers, positions)
            self._drafter.add_rows(np.array(positions), self._features.rows(kv, positions))
            self._rows = positions.stop


def guesses_for(bundle: Bundle, engine: Engine, mode: Mode | None = None) -> Guesses | None:
    """Guesses for the understudy of `bundle`; None where it has none that is the drafter's own target, or without the
    server half."""
    entry, path = bundle.manifest.understudy, bundle.path(SERVER_HALF)
    if not (bundle.has_understudy and entry and entry.source_hash == bundle.manifest.target_hash and path.is_file()):
        return None
    try:
        return Guesses(bundle, engine, _server_half(path, bundle.manifest.drafter_hash), mode)
    except (SafetensorError, OSError, ValueError, KeyError, DrafterError):
        return None  # it writes as well without


def _server_half(path: Path, drafter_hash: str) -> HostFeatures:
    with safe_open(str(path), framework="numpy") as file:
        described = file.metadata() or {}
        if described.get("drafter_hash") != drafter_hash:
            raise DrafterError(f"{path} is another drafter's")
        config = MoAConfig.from_dict(json.loads(described["config"]))
        tensors = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118 - no dict
    return HostFeatures(config, tensors)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
