"""Small target and drafter distributions, and the exact distribution of what speculative rounds emit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lab.baselines.choice import Chooser, Floats, distribution_of
from lab.baselines.drafting import LevelDistribution
from lab.baselines.trees import CandidateTree

VOCAB = 3
#: tokens whose joint distribution is compared
LENGTH = 3


def random_distribution(generator: np.random.Generator, vocab: int = VOCAB, zeros: float = 0.2) -> Floats:
    """A distribution [vocab] in which each token has probability 0 with probability `zeros`."""
    distribution = generator.dirichlet(np.ones(vocab)) * (generator.random(vocab) >= zeros)
    return distribution / distribution.sum() if distribution.sum() > 0.0 else np.eye(vocab)[generator.integers(vocab)]


@dataclass(frozen=True)
class Model:
    """A language model given by its distributions: text -> distribution [VOCAB]."""

    distributions: dict[tuple[int, ...], Floats]

    @classmethod
    def random(cls, seed: int, zeros: float = 0.2) -> Model:
        generator = np.random.default_rng(seed)
        texts = (text for n in range(LENGTH) for text in itertools.product(range(VOCAB), repeat=n))
        return cls({text: random_distribution(generator, VOCAB, zeros) for text in texts})

    def rows(self, tree: CandidateTree) -> Floats:
        """Distributions behind the root and every node, [nodes + 1, VOCAB]."""
        return np.stack([self.distributions[tree.text(node)] for node in range(-1, len(tree))])

    @property
    def level_distribution(self) -> LevelDistribution:
        return lambda tree, frontier: np.stack([self.distributions[tree.text(node)] for node in frontier])

    def likelihood(self, text: tuple[int, ...], behind: tuple[int, ...] = ()) -> float:
        """Probability of the tokens `text` behind the tokens `behind`."""
        whole = behind + text
        return float(np.prod([self.distributions[whole[:at]][whole[at]] for at in range(len(behind), len(whole))]))


def joint_error(target: Model, emit: Callable[[Chooser], tuple[int, ...]]) -> float:
    """Total variation between the distribution of LENGTH tokens begun by `emit` and the target's own.

    What a round emits is cut to LENGTH tokens; where it emits fewer, the target's plain decoding goes on.
    """
    emitted = distribution_of(lambda chooser: emit(chooser)[:LENGTH])
    error = 0.0
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        begun = sum(emitted.get(text[:n], 0.0) * target.likelihood(text[n:], text[:n]) for n in range(1, LENGTH + 1))
        error += abs(begun - target.likelihood(text)) / 2
    return error
