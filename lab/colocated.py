"""A verifier that drafts by itself: trees for GENERATE and chat completions, drafted where they are verified.

    python -m lab.colocated --drafter drafters/smollm2-135m-instruct-moa --port 8765
    python -m benchmarks.network --prompts questions.jsonl --modes ahead stream --stream-by lab.colocated

This is the strongest competitor of drafting on the device: nothing is sent between drafting and verifying. It runs the
device's own drafter code on the same feature rows, so that only the place differs. All flags are those of
`python -m cloud.verifier`, except --step-ms, which is that of `benchmarks.slow_target`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from benchmarks.slow_target import slow_down
from cloud import loading, verifier
from cloud.engine.choice import EngineName
from cloud.engine.scheduler import Scheduler
from cloud.engine.segment import Segment
from cloud.engine.served_model import ServedModel
from cloud.engine.sessions import SessionRecord
from cloud.settings import Settings
from cloud.telemetry.progress import BuildProgress
from lab.contenders import MoAContender
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.models.folders import default_drafter
from outrider_core.models.target import open_target
from outrider_core.protocol.prefix import common_prefix
from outrider_core.protocol.rows import unpack_rows
from outrider_core.protocol.tree import MAX_NODES, TokenTree
from outrider_core.protocol.wire import Generate
from outrider_core.targets.source import TargetSource

#: drafting here costs the verifier's own time, so trees are at most as large as a device's usual ones
NODES = 32


@dataclass
class _Drafting:
    drafter: Drafter
    tokens: list[int] = field(default_factory=list)  # the text below which the last tree was drafted
    rows: int = 0  # feature rows that the drafter has


class ColocatedScheduler(Scheduler):
    """Drafts for every session with a GENERATE. open_drafter: makes a drafter for one of them."""

    def __init__(self, open_drafter: Callable[[], Drafter], *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **{**options, "lookup": None})
        self._open_drafter = open_drafter
        self._drafting: WeakKeyDictionary[SessionRecord, _Drafting] = WeakKeyDictionary()

    def schedule(self, waiting: Sequence[SessionRecord], maskless: Set[SessionRecord] = frozenset()) -> list[Segment]:
        """See Scheduler.schedule."""
        for session in waiting:
            if session.round is not None:
                session.round.is_drafted = True
        return super().schedule(waiting, maskless)

    def propose(self, session: SessionRecord) -> TokenTree:
        """See Scheduler.propose; for a GENERATE the drafter's tree."""
        request = session.round
        if request is None or not isinstance(request.message, Generate):
            return super().propose(session)
        return self._draft(session).pruned(MAX_NODES, request.message.max_new - request.generated - 1)

    def _draft(self, session: SessionRecord) -> TokenTree:
        drafting = self._drafting.get(session)
        if drafting is None:
            drafting = self._drafting[session] = _Drafting(self._open_drafter())
        drafter = drafting.drafter
        drafting.rows = min(drafting.rows, common_prefix(drafting.tokens, session.tokens))
        drafter.keep_rows(drafting.rows)
        if (stop := session.rows.stop) > drafting.rows:
            rows = unpack_rows(session.rows.block(drafting.rows, stop), session.rows.shape)
            drafter.add_rows(np.arange(drafting.rows, stop), rows)
            drafting.rows = stop
        drafting.tokens = list(session.tokens)
        shape = TreeShape(nodes=max(1, min(self.tree_budget, NODES)))
        return drafter.draft(drafting.tokens, session.sampling, shape).tree


def draft_here() -> None:
    """Make the verifiers of this process draft by themselves."""
    load = loading.load_model

    def loaded(
        settings: Settings, source: TargetSource, engine: EngineName, progress: BuildProgress | None = None
    ) -> ServedModel:
        tables = open_target(source).tables()
        folder = settings.drafter or default_drafter()
        drafter = MoAContender("colocated", folder, tables, lookup=True, row_cost=None)
        model = load(settings, source, engine, progress)
        return replace(model, scheduler=partial(ColocatedScheduler, drafter.fresh))

    loading.load_model = loaded


def main(argv: list[str] | None = None) -> int:
    """Run the verifier. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.colocated", description=__doc__, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--step-ms", type=float, default=0.0, help="ms a step takes at least")
    options, rest = parser.parse_known_args(argv)
    draft_here()
    if options.step_ms:
        slow_down(options.step_ms / 1000)
    return verifier.main(rest)


if __name__ == "__main__":
    sys.exit(main())
