"""Multi-candidate speculative decoding (MCSD, arXiv 2401.06706; improved: 2409.10644) on any drafter of the lab.

Candidates are drawn from the drafter's distribution and accepted by a rule of `lab.baselines.rules`, instead of being
ranked and compared with the target's own keyed draw as the product does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloud.engine.acceptance import AcceptedPath
from cloud.engine.engine import TargetEngine
from cloud.engine.runner import Logits
from cloud.engine.segment import Segment
from cloud.torch_engine.drawing import TorchLogits
from lab.baselines.choice import Chooser
from lab.baselines.decision import DecisionModel, hard_features
from lab.baselines.drafting import Draft, grow
from lab.baselines.multiseed import draw_seeds, verify_multiseed
from lab.baselines.rules import residual_without_replacement, sample_and_match
from lab.baselines.sampling import draft_distribution, drawing, target_distribution
from lab.baselines.trees import CandidateTree
from lab.baselines.verification import verify
from outrider_core.drafting.drafter import Draft as DeviceDraft
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.drafting.growth import Growth
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import ROOT, TokenTree
from outrider_core.protocol.wire import FINISH_EOS, FINISH_NONE

Distributions = NDArray[np.float64]
#: logits [nodes + 1, vocab] of a tree -> accepted nodes and the token behind them
Accept = Callable[[NDArray[np.float32]], tuple[list[int], int]]


class RuleEngine(TargetEngine):
    """The verifier's engine with a selectable acceptance rule; if `rule` is None, the product's own."""

    rule: Accept | None = None
    logits = torch.empty(0)  # of the last step

    def accept(
        self, segments: Sequence[Segment], logits: Logits | None, until: float = 0.0
    ) -> list[AcceptedPath | None]:
        """See TargetEngine.accept. A rule judges one tree at a time."""
        if isinstance(logits, TorchLogits):
            self.logits = logits.values
        tree = segments[0].tree
        if self.rule is None or not segments[0].wanted:
            return super().accept(segments, logits)
        path, bonus = self.rule(self.logits.float().cpu().numpy())
        ends = [index for index, node in enumerate(path) if tree.tokens[node] in self.eos_ids]
        if ends:
            path, bonus = path[: ends[0]], tree.tokens[path[ends[0]]]
        return [AcceptedPath(path, bonus, FINISH_EOS if bonus in self.eos_ids else FINISH_NONE)]


class EarlyStop(NamedTuple):
    """Draft another level only while a node of the newest promises more than `threshold` (arXiv 2409.10644)."""

    model: DecisionModel
    threshold: float


class SampledDrafter:
    """Draws the full tree of a profile (children per level) from a drafter's distribution; `accept` judges it.

    early: when to stop before the end of the profile; exact all the same, as no drawn candidate is dropped. head: the
    drafter's LM head, whose input a soft decision model reads. seeds: 0 for MCSD with residual rejection, drawn without
    replacement. Otherwise the published target-initialised process with `seeds` seeds, which is LOSSY; it begins with
    the first round of MCSD that accepts something.
    """

    def __init__(
        self,
        inner: Drafter,
        profile: Sequence[int],
        chooser: Chooser,
        seeds: int = 0,
        early: EarlyStop | None = None,
        head: nn.Module | None = None,
    ) -> None:
        self.inner, self._profile, self._chooser, self._seeds = inner, tuple(profile), chooser, seeds
        self._early, self._head = early, head
        self._ids: list[int] = inner.draft_ids.tolist()
        self._columns = {token: column for column, token in enumerate(self._ids)}
        self.drafted = Draft(CandidateTree(), np.zeros((0, 0)))
        self.levels: list[Level] = []
        self._places: list[int] = []
        self._sampling = Sampling()
        self._seed_distribution: Distributions | None = None

    @property
    def steps(self) -> int:
        return self.inner.steps

    def draft(self, prefix: list[int], sampling: Sampling, shape: TreeShape) -> DeviceDraft:
        """Return the tree to verify; equal candidates are in it once. shape: only its depth counts."""
        self._sampling = sampling
        self.inner.lookup = None
        level_distributions = _LevelDistributions(self.inner, prefix, sampling, self._token, self._head)
        self.levels = level_distributions.levels
        profile = self._profile[: shape.depth]
        seeds: list[int] = []
        if self._seed_distribution is not None:
            drawn = draw_seeds(self._seed_distribution, self._seeds, self._chooser, sampling.greedy)
            seeds = [self._columns.get(token, len(self._ids) + token) for token in drawn]
            profile = (len(seeds), *profile[1:])
        draft = grow(
            level_distributions, profile, drawing(sampling, replacement=False), self._chooser, seeds, self._proceed
        )
        tree = draft.tree
        self.drafted = Draft(CandidateTree(tuple(map(self._token, tree.tokens)), tree.parents, tree.how), draft.q)
        sent, self._places = merged(self.drafted.tree)
        return DeviceDraft(sent)

    def _proceed(self, tree: CandidateTree, expanded: range, q: Distributions) -> bool:
        if self._early is None:
            return True
        model, threshold = self._early
        return model.proceed(self.levels[-1].features(model.config.kind), threshold)

    def accept(self, logits: NDArray[np.float32]) -> tuple[list[int], int]:
        """See `Accept`. Only rows on the path become distributions, unless the rule wants all."""
        tree, (p, q) = self.drafted.tree, self.distributions(logits)
        if self._seed_distribution is None:
            rule = sample_and_match if self._sampling.greedy else residual_without_replacement
            path, bonus = verify(tree, p, q, rule, self._chooser)  # type: ignore[arg-type]
            if not self._seeds or not path:
                return [self._places[node] for node in path], bonus
            self._seed_distribution = p[path[-1] + 1]
        else:
            forest = Draft(tree, np.stack([q[row] for row in range(len(q))]))
            distributions = np.stack([p[row] for row in range(len(p))])
            path, self._seed_distribution = verify_multiseed(
                forest, distributions, self._chooser, lossy=True, greedy=self._sampling.greedy
            )
        # seeds stand in for a token after the path; its last token is run once more, as the next root
        return [self._places[node] for node in path[:-1]], tree.tokens[path[-1]]

    def distributions(self, logits: NDArray[np.float32]) -> tuple[_Lazy, _Lazy]:
        """Return p and q over the whole vocabulary, rows as in `Draft`, from the target's logits for the tree sent."""
        rows = [0, *(1 + place for place in self._places)]
        p = _Lazy(len(rows), lambda row: target_distribution(logits[rows[row]][None], self._sampling)[0])
        return p, _Lazy(len(self.drafted.q), lambda row: self._spread(row, logits.shape[1]))

    def _token(self, column: int) -> int:
        """Return the token of a column: the draft vocabulary's, then seeds that it lacks."""
        return self._ids[column] if column < len(self._ids) else column - len(self._ids)

    def _spread(self, row: int, vocab: int) -> Distributions:
        distribution = np.zeros(vocab)
        if self.drafted.q.shape[1]:  # else there are only seeds
            distribution[self.inner.draft_ids] = self.drafted.q[row]
        return distribution


class Level(NamedTuple):
    """The drafter's knowledge of the nodes above a level that it drafts.

    q [nodes, draft_vocab]; states [nodes, hidden_size], its last hidden ones: [nodes, 0] if no head was given.
    """

    q: Distributions
    states: NDArray[np.float32]

    def features(self, kind: str) -> NDArray[np.float32]:
        """Return [nodes, features] for a decision model of that kind."""
        return hard_features(self.q) if kind == "hard" else self.states


class _LevelDistributions:
    """The drafter's distributions over its own vocabulary, level by level
    (`lab.baselines.drafting.LevelDistribution`)."""

    def __init__(
        self,
        inner: Drafter,
        prefix: list[int],
        sampling: Sampling,
        token: Callable[[int], int],
        head: nn.Module | None,
    ) -> None:
        self._inner, self._prefix, self._sampling, self._token = inner, prefix, sampling, token
        self._head = head
        self.levels: list[Level] = []
        self._growth: Growth | None = None

    def __call__(self, tree: CandidateTree, frontier: range) -> Distributions:
        with _inputs(self._head) as given:
            logits = self._logits(tree, frontier)
        # one input per step, and some drafters take several; the requested rows are the last
        states = torch.cat(given)[-len(logits) :] if given else torch.empty(len(logits), 0)
        self.levels.append(Level(draft_distribution(logits, self._sampling), states.float().cpu().numpy()))
        return self.levels[-1].q

    def _logits(self, tree: CandidateTree, frontier: range) -> NDArray[np.float32]:
        if self._growth is None:
            logits = self._inner._advance(self._prefix)
            self._growth = Growth(len(self._prefix))
        for node in range(len(self._growth), len(tree)):
            self._growth.add(tree.parents[node], [self._token(tree.tokens[node])], [0.0])
        if frontier.start != ROOT:
            logits = self._inner._expand(self._growth, list(frontier))
        return logits


@contextmanager
def _inputs(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """Yield the inputs that `module` is called with in the meantime."""
    given: list[Tensor] = []
    if module is None:
        yield given
        return
    handle = module.register_forward_pre_hook(lambda _module, inputs: given.append(inputs[0]))
    try:
        yield given
    finally:
        handle.remove()


class _Lazy:
    """Rows that are computed when they are read."""

    def __init__(self, rows: int, row: Callable[[int], Distributions]) -> None:
        self._rows, self._row = rows, row

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Distributions:
        return self._row(row)


def merged(tree: CandidateTree) -> tuple[TokenTree, list[int]]:
    """Return (tree in which every path of tokens occurs once, for every candidate its node there)."""
    tokens: list[int] = []
    parents: list[int] = []
    places: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        above = ROOT if parent == ROOT else places[parent]
        if (above, token) not in known:
            known[above, token] = len(tokens)
            tokens.append(token)
            parents.append(above)
        places.append(known[above, token])
    return TokenTree(tuple(tokens), tuple(parents)), places
