"""Node rules: how the target's distribution p picks among the candidates below one node, or emits a token of its own.

Every rule here is lossless: the token it gives, candidate or not, has exactly the distribution p, whatever q is. By the
chain rule the same then holds for whole trees (`verification.verify`). The docstring of a rule states what it requires
of its candidates, which is checked as far as their origin shows; p and q are distributions [vocab] after the same
temperature and truncation as for the target's sampling and the candidates' draws.

The product's own rule, Gumbel-matched draws (`outrider_core.protocol.noise`, `cloud.engine.acceptance`), is
`sample_and_match` with a keyed draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lab.baselines.choice import Chooser, Floats
from lab.baselines.trees import How, Siblings


class RuleError(ValueError):
    """The candidates violate the rule's conditions; using it would change the output's distribution."""


class Choice(NamedTuple):
    """token: the next token; child: the index of the candidate to descend to, None to stop."""

    token: int
    child: int | None


#: (p [vocab], q [vocab] or None, candidates (one or more), chooser) -> choice
Rule = Callable[[Floats, Floats | None, Siblings, Chooser], Choice]


def sample_and_match(p: Floats, q: Floats | None, siblings: Siblings, chooser: Chooser) -> Choice:
    """Draw from p and descend if the token is a candidate ("MCNS", arXiv 2401.06706). q is not read.

    Candidates may come from anywhere (the most likely ones, pruned, reranked, looked up), as long as they do not
    depend on this draw. For candidates chosen without chance no rule accepts more.
    """
    return _match(chooser.draw(p), siblings.tokens)


def residual_with_replacement(p: Floats, q: Floats | None, siblings: Siblings, chooser: Chooser) -> Choice:
    """Try each candidate against what p has left, r; on rejection r <- normalise(max(r - q, 0)).

    SpecInfer (arXiv 2305.09781), MCSD with replacement (arXiv 2401.06706). Needs independent draws from q, all of
    them, in their order, repeated tokens included.
    """
    q = _drawn_from(q, siblings, How.INDEPENDENT)
    r = p
    for child, token in enumerate(siblings.tokens):
        if chooser.accept(_ratio(r, q, token)):
            return Choice(token, child)
        r = _residual(r, q)
    return Choice(chooser.draw(r), None)


def residual_without_replacement(p: Floats, q: Floats | None, siblings: Siblings, chooser: Chooser) -> Choice:
    """Like with replacement, but against s, which is q without the candidates tried before.

    MCSD without replacement (arXiv 2401.06706), EAGLE (2401.15077), Sequoia (2402.12374), recursive speculative
    decoding (2402.14160). Needs draws without replacement, in their order: sorted or pruned by
    probability they would be biased.
    """
    s = _drawn_from(q, siblings, How.DISTINCT)
    r = p
    for child, token in enumerate(siblings.tokens):
        if chooser.accept(_ratio(r, s, token)):
            return Choice(token, child)
        r = _residual(r, s)
        s = _without(s, token)
    return Choice(chooser.draw(r), None)


def k_seq(p: Floats, q: Floats | None, siblings: Siblings, chooser: Chooser) -> Choice:
    """Accept candidates with probability p / (rho q), rho from `k_seq_scale` (SpecTr, arXiv 2310.15141).

    Needs independent draws from one q; their number must not depend on them. Accepts at least 1 - 1/e of what the best
    possible rule would.
    """
    q = _drawn_from(q, siblings, How.INDEPENDENT)
    rho = k_seq_scale(p, q, len(siblings.tokens))
    for child, token in enumerate(siblings.tokens):
        if chooser.accept(_ratio(p, rho * q, token)):
            return Choice(token, child)
    shared = np.minimum(q, p / rho)  # the share of each token from one candidate
    beta = shared.sum()
    rounds = (1.0 - (1.0 - beta) ** len(siblings.tokens)) / beta if beta > 0.0 else 0.0
    return Choice(chooser.draw(_residual(p, shared * rounds)), None)


def k_seq_scale(p: Floats, q: Floats, count: int) -> float:
    """Find rho in [1, count] with 1 - (1 - beta)^count = rho beta, beta = sum min(q, p / rho), by bisection.

    The upper end of the last interval: there no token is given more than p by the candidates.
    """
    low, high = 1.0, float(count)
    for _ in range(60):
        rho = (low + high) / 2
        beta = np.minimum(q, p / rho).sum()
        if 1.0 - (1.0 - beta) ** count <= rho * beta:
            high = rho
        else:
            low = rho
    return high


def mixed(p: Floats, q: Floats | None, siblings: Siblings, chooser: Chooser) -> Choice:
    """Try one drawn candidate first, by rejection; then the token drawn from the residual may match a fixed one.

    Needs fixed candidates followed by one drawn from q without them (`sampling.draw_mixed`). Accepts as much as
    any rule can for such candidates: p of the fixed ones plus sum min(p, q') over the others, q' the distribution of
    the draw.
    """
    *fixed, last = siblings.how
    if any(how is not How.FIXED for how in fixed):
        raise RuleError("only the last candidate may be a draw")
    if last is How.FIXED:  # the tree was cut before the draw
        return sample_and_match(p, q, siblings, chooser)
    for token in siblings.tokens[:-1]:
        q = _without(_distribution(q), token)
    distribution = _distribution(q)
    token = siblings.tokens[-1]
    if chooser.accept(_ratio(p, distribution, token)):
        return Choice(token, len(fixed))
    return _match(chooser.draw(_residual(p, distribution)), siblings.tokens[:-1])


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (sample_and_match, residual_with_replacement, residual_without_replacement, k_seq, mixed)
}


def _match(token: int, candidates: tuple[int, ...]) -> Choice:
    return Choice(token, candidates.index(token) if token in candidates else None)


def _distribution(q: Floats | None) -> Floats:
    if q is None:
        raise RuleError("this rule needs the distribution that the candidates were drawn from")
    return q


def _drawn_from(q: Floats | None, siblings: Siblings, wanted: How) -> Floats:
    alone = len(siblings.how) == 1 and siblings.how[0] is not How.FIXED  # a single draw is both kinds
    if not alone and any(how is not wanted for how in siblings.how):
        raise RuleError(f"the rule needs candidates {wanted.value}; use sample_and_match for any others")
    return _distribution(q)


def _ratio(r: Floats, s: Floats, token: int) -> float:
    if not s[token] > 0.0:
        raise RuleError(f"candidate {token} has probability 0 under the distribution it was drawn from")
    return float(r[token] / s[token])


def _residual(r: Floats, s: Floats) -> Floats:
    """Return normalise(max(r - s, 0)). Without mass r equals s and rejecting was a rounding error: r itself."""
    rest = np.maximum(r - s, 0.0)
    mass = rest.sum()
    return rest / mass if mass > 0.0 else r


def _without(s: Floats, token: int) -> Floats:
    """Return normalise(s with token at 0); without mass left all zeros."""
    rest = s.copy()
    rest[token] = 0.0
    mass = rest.sum()
    return rest / mass if mass > 0.0 else rest
