"""Draft trees for an understudy that writes offline: device only, if they make it faster.

The understudy verifies them itself: it replaces the target, with feature rows from its own keys and values. So trees
behave as over a link with a round trip of zero, and the same measurements decide (`edge_runtime.speed`): trees, or one
token a step. The text is the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from edge_runtime.session.tuning import LARGEST
from edge_runtime.speed.ahead import Ahead
from edge_runtime.speed.arms import Arm
from edge_runtime.speed.controller import Controller
from outrider_core.drafting.bundle import SERVER_HALF_FILE, UNDERSTUDY_FOLDER, Bundle
from outrider_core.drafting.drafter import PROMPT_CHUNK, Drafter, TreeShape
from outrider_core.drafting.engines import Engine
from outrider_core.models.host_features import HostFeatures
from outrider_core.models.moa_config import DrafterError, MoAConfig
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.prefix import common_prefix
from outrider_core.protocol.tree import TokenTree
from outrider_core.targets.config import TargetConfig
from outrider_core.targets.understudy import Decoding, Understudy, UnderstudyDrafter

#: tree sizes of the timed steps, one before each of the first tokens, and how often each is timed: the fastest counts
TIMED_NODES, TIMES = (0, 4, 16), 3
#: least seconds assumed for a step
LEAST_SECONDS = 1e-6
#: rows computed at a time
ROWS_CHUNK = 128


@dataclass(frozen=True)
class _Step:
    """The understudy's last step, after the first `base` tokens of a text; it took `seconds`.

    trial: seconds spent on drafting a tree only to measure its gain; None: it was not a trial.
    """

    base: int
    tree: TokenTree = TokenTree()  # noqa: RUF009 - frozen
    scores: tuple[float, ...] = ()
    trial: float | None = None
    seconds: float = 0.0


class OfflineDrafter:
    """Drafts for one understudy. Not thread-safe: only its thread calls it.

    engine: of the drafter; other drafters may use it at the same time. features: the drafter's server half. shape: the
    largest trees. lookup: as in the runtime. mode: trees, or a token a step, pinned; None: whichever is faster.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        features: HostFeatures,
        shape: TreeShape = LARGEST,
        lookup: bool = True,
        mode: Arm | None = None,
    ) -> None:
        self._features, self._shape = features, shape
        self._made = partial(Drafter.of, bundle, engine, lookup)
        self._drafter: Drafter | None = None  # made on first use
        self._timed: list[float] = []  # of TIMED_NODES, in turn
        self.controller = Controller(ahead=Ahead(fixed=True), pinned=mode)
        self._text: list[int] = []  # at the last step
        self._rows = 0  # number of its first tokens whose feature rows the drafter holds
        self._prompt_length = -1  # of the answer in progress
        self._asked: _Step | None = None  # the present one
        self._step: _Step | None = None

    def tree(
        self,
        understudy: Understudy,
        text: list[int],
        decoding: Decoding,
        cancelled: Callable[[], bool],
    ) -> TokenTree:
        """Return a tree after `text`, whose last token alone the understudy has not read.

        Empty if plain steps are faster, or once `cancelled`.
        """
        costs, trees = self.controller.costs, self.controller.tree
        if self.controller.pinned is Arm.STREAM or not self._has_timed(understudy):
            return TokenTree()
        mode = self._went_on(text, decoding.prompt_length)
        self._asked = _Step(len(text))
        more = costs.step(trees.nodes) - costs.step(0)
        if mode is Arm.STREAM and not self.controller.compares(Arm.TREE, max(0.0, more)):
            return TokenTree()
        began, first = time.perf_counter(), self._step is None or not self._step.tree
        drafter = self._drafter = self._drafter or self._made()
        if not self._has_read(drafter, understudy, text, cancelled):
            return TokenTree()
        nodes = min(self._shape.nodes, trees.worth_drafting())
        shape = replace(self._shape, nodes=nodes, gain=trees.gain(costs) or self._shape.gain)
        draft = drafter.draft(text, decoding.sampling, shape, cancelled, decoding.rules)
        seconds = time.perf_counter() - began
        tree = draft.tree.pruned(trees.worth_sending(draft.tree, draft.scores, costs), len(draft.tree))
        trees.drafted(seconds, draft.steps)
        if mode is Arm.TREE and first:
            self.controller.prepared()
        elif mode is Arm.TREE:
            self.controller.waited(seconds)
        trial = seconds if mode is Arm.STREAM else None
        self._asked = _Step(len(text), tree, draft.scores[: len(tree)], trial)
        return tree

    def stepped(self, seconds: float) -> None:
        """Note the duration of the step that was prepared."""
        if self._asked:
            self._step, self._asked = replace(self._asked, seconds=max(LEAST_SECONDS, seconds)), None

    def forget(self) -> None:
        """Forget all texts, and free their memory."""
        self._drafter, self._step, self._asked, self._text, self._rows = None, None, None, [], 0

    def _has_timed(self, understudy: Understudy) -> bool:
        """Return whether the understudy's step costs are known; otherwise time one more step."""
        sizes, costs = len(TIMED_NODES), self.controller.costs
        if costs.curve is None and len(self._timed) < TIMES * sizes:
            seconds = understudy.time_step(TIMED_NODES[len(self._timed) % sizes])
            self._timed.append(max(LEAST_SECONDS, seconds))
        elif costs.curve is None:
            fastest = (min(self._timed[size::sizes]) for size in range(sizes))
            costs.curve = CostCurve(tuple(1 + nodes for nodes in TIMED_NODES), tuple(accumulate(fastest, max)))
        return costs.curve is not None

    def _went_on(self, text: list[int], prompt_length: int) -> Arm:
        """Learn from the last step, if `text` continues it; return the mode of the next one."""
        same = common_prefix(self._text, text)
        step, self._text = self._step, list(text)
        if same < self._rows:
            self._rows = same
            if self._drafter:
                self._drafter.keep_rows(same)
        if step is None or prompt_length != self._prompt_length or not same == step.base < len(text):
            self._prompt_length, self._step = prompt_length, None
            return self.controller.begin()
        controller = self.controller
        path = step.tree.foreseen(text[step.base :]) or []
        if step.trial is not None:
            controller.explorer.lost(step.trial - controller.costs.exposed)  # the text had to be read
            controller.foreseen(step.tree, step.scores, path, step.trial)
            controller.costs.stepped(1 + len(step.tree), step.seconds)
        elif step.tree:
            controller.verified(step.tree, step.scores, path, step.seconds, step.seconds)
        else:
            controller.streamed(step.seconds, step.seconds)
        return self.controller.choose()

    def _has_read(
        self, drafter: Drafter, understudy: Understudy, text: list[int], cancelled: Callable[[], bool]
    ) -> bool:
        """Give the drafter missing feature rows, and the text. Returns False if it was `cancelled`."""
        while self._rows < len(text) - 1:
            if cancelled():
                return False
            positions = range(self._rows, min(self._rows + ROWS_CHUNK, len(text) - 1))
            kv = understudy.gather(self._features.layers, positions)
            drafter.add_rows(np.array(positions), self._features.rows(kv, positions))
            self._rows = positions.stop
        while len(drafter.cached) < len(text) - PROMPT_CHUNK or drafter.cached != text[: len(drafter.cached)]:
            if cancelled():
                return False
            same = common_prefix(drafter.cached, text)
            drafter.read(text[: same + PROMPT_CHUNK])
        return not cancelled()


def understudy_of(
    bundle: Bundle, threads: int = 0, drafter: Callable[[TargetConfig], UnderstudyDrafter | None] | None = None
) -> Understudy:
    """Return the understudy of `bundle`, which may have none. Other arguments: see `Understudy`."""
    entry, manifest = bundle.manifest.understudy, bundle.manifest
    return Understudy(
        bundle.folder / (entry.folder if entry else UNDERSTUDY_FOLDER),
        entry.manifest_sha256 if entry else "",
        manifest.max_context,
        manifest.vocab_size,
        bundle.decode,
        threads,
        drafter,
        entry.barred if entry else (),
    )


def offline_drafter_for(
    bundle: Bundle,
    engine: Engine,
    model: TargetConfig,
    shape: TreeShape = LARGEST,
    lookup: bool = True,
    mode: Arm | None = None,
) -> OfflineDrafter | None:
    """Return an `OfflineDrafter` for the understudy of `bundle`, which has the shapes of `model`.

    None if that is not the drafter's own target, or if there is no usable server half. Other arguments: see
    `OfflineDrafter`.
    """
    entry, path = bundle.manifest.understudy, bundle.path(SERVER_HALF_FILE)
    if not (entry and entry.source_hash == bundle.manifest.target_hash and path.is_file()):
        return None
    try:
        return OfflineDrafter(bundle, engine, server_half(path, bundle, model), shape, lookup, mode)
    except Exception:  # a fault in a file that no manifest lists: it writes without
        return None


def server_half(path: Path, bundle: Bundle, model: TargetConfig) -> HostFeatures:
    """Open the server half in the file, for the bundle and its understudy.

    Raises various exceptions if it is unusable.
    """
    from safetensors import safe_open  # most devices never need it

    with safe_open(str(path), framework="numpy") as file:
        described = file.metadata() or {}
        if described.get("drafter_hash") != bundle.manifest.drafter_hash:
            raise DrafterError(f"{path} is another drafter's")
        config = MoAConfig.from_dict(json.loads(described["config"]))
        tensors = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118 - no dict
    config.check_fits(model, "the understudy")
    features = HostFeatures(config, tensors)
    rows = features.rows(np.ones((2, len(features.layers), config.kv_width), np.float32), [0, 1])
    if rows.shape != (2, 2, *bundle.row_shape) or not all(
        np.isfinite(each).all() for each in (rows, *tensors.values())
    ):
        raise DrafterError(f"{path} makes no rows of this bundle's drafter")
    return features
