"""Draw the target's tokens from rows of logits, on the device that holds them.

On the CPU `cloud.engine.drawing` is used, row by row as the walk down a tree asks: in a trial numpy was several times
as fast as torch. On a GPU the same rule runs there for all rows of a step in one pass, so that only token ids
travel, once.
Both give the same tokens; tests compare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cloud.engine.acceptance import NO_TOKEN, Chances
from cloud.engine.drawing import HostLogits
from outrider_core.protocol.constraint import Adjustment
from outrider_core.protocol.sampling import Sampling

_MASK = 0xFFFFFFFF
#: most numbers of one float64 array while tokens are drawn: 256 MiB
_MOST_NUMBERS = 1 << 25
#: a row of the logits, how to draw from it, and the absolute position of the draw
Place = tuple[int, Sampling, int]


class TorchLogits:
    """`cloud.engine.runner.Logits` on a device: values [n, vocab] in any float format.

    depths: of each row, its depth below its tree's root; 0 begins another tree. On a GPU the first draw from a root
    draws for its whole tree, with the root's sampling and the positions that follow, so that one pass and one copy to
    the host serve the walk down; adjusted draws are made on demand.
    """

    def __init__(self, values: Tensor, depths: Sequence[int] = ()) -> None:
        self.values = values
        self._depths = list(depths)
        self._ahead: dict[Place, int] = {}

    @torch.inference_mode()
    def draw(
        self,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        adjustments: Sequence[Adjustment | None] = (),
    ) -> list[int]:
        """See Logits.draw."""
        if self.values.device.type == "cpu":
            return draw_tokens(self.values[list(rows)], samplings, positions, adjustments)
        return self.draw_trees(rows, samplings, positions, adjustments)

    def draw_trees(
        self,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        adjustments: Sequence[Adjustment | None] = (),
    ) -> list[int]:
        """Draw the same, whole trees at a time."""
        wanted: list[Place] = list(zip(rows, samplings, positions, strict=True))
        changes = adjustments or [None] * len(wanted)
        plain = [place for place, change in zip(wanted, changes, strict=True) if change is None]
        fresh = [below for place in plain if place not in self._ahead for below in self._tree(*place)]
        if fresh:
            at, how, where = zip(*fresh, strict=True)
            self._ahead.update(zip(fresh, draw_tokens(self.values[list(at)], how, where), strict=True))
        held = [index for index, change in enumerate(changes) if change is not None]
        adjusted = dict[int, int]()
        if held:
            at, how, where = zip(*(wanted[index] for index in held), strict=True)
            tokens = draw_tokens(self.values[list(at)], how, where, [changes[index] for index in held])
            adjusted = dict(zip(held, tokens, strict=True))
        return [adjusted[index] if index in adjusted else self._ahead[place] for index, place in enumerate(wanted)]

    def _tree(self, row: int, sampling: Sampling, position: int) -> Iterator[Place]:
        """Yield the row itself, and if it is a tree's root, all rows below."""
        yield row, sampling, position
        for below, depth in enumerate(self._depths[row + 1 :] if self._depths[row : row + 1] == [0] else (), row + 1):
            if depth == 0:
                return
            yield below, sampling, position + depth

    @torch.inference_mode()
    def chances(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[Chances]:
        """See Logits.chances. The rows are copied to the host."""
        host = HostLogits(self.values[list(rows)].to("cpu", torch.float64).numpy())
        return host.chances(range(len(rows)), tokens, top)


def draw_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    adjustments: Sequence[Adjustment | None] = (),
) -> list[int]:
    """Draw one token per row of logits [n, vocab], each adjusted, for absolute position positions[i].

    NO_TOKEN if a row's largest logit is not finite, as is the case if any of them is NaN.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if logits.device.type == "cpu":
        return HostLogits(logits.numpy()).draw(range(len(logits)), samplings, positions, adjustments)
    return draw_on_device(logits, samplings, positions, adjustments)


def draw_on_device(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    adjustments: Sequence[Adjustment | None] = (),
) -> list[int]:
    """Draw the same on the logits' own device, in float64; [n, vocab] float32 or float64."""
    if any(adjustment is not None for adjustment in adjustments):
        logits = _adjusted(logits, adjustments)
    tokens = _first_argmax(logits)
    sampled = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    limit = max(1, _MOST_NUMBERS // logits.shape[1])
    for start in range(0, len(sampled), limit):
        rows = sampled[start : start + limit]
        rules = [samplings[row] for row in rows]
        noise = _gumbel(_noise_keys(rules, [positions[row] for row in rows], logits.device), logits.shape[1])
        tokens[rows] = _first_argmax(_log_probs(logits[rows], rules) + noise)
    drawn: list[int] = torch.where(logits.amax(-1).isfinite(), tokens, NO_TOKEN).tolist()
    return drawn


def _adjusted(logits: Tensor, adjustments: Sequence[Adjustment | None]) -> Tensor:
    """Compute outrider_core.protocol.constraint.adjusted for rows [n, vocab], in torch: a copy in float64."""
    x = logits.to(torch.float64, copy=True)
    for row, adjustment in enumerate(adjustments):
        if adjustment is None:
            continue
        x[row, torch.from_numpy(adjustment.tokens).to(x.device)] += torch.from_numpy(adjustment.amounts).to(x.device)
        mask = adjustment.mask(x.shape[1])
        if mask is not None:
            x[row].masked_fill_(torch.from_numpy(~mask).to(x.device), float("-inf"))
    return x


def _first_argmax(x: Tensor) -> Tensor:
    """Compute argmax over the last axis; ties go to the lowest id, on every device."""
    ids = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), ids, x.shape[-1]).amin(-1)


def _log_probs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Compute outrider_core.protocol.sampling.log_probs for rows [n, vocab], none of them greedy, in torch: float64."""
    vocab = logits.shape[1]
    numbers = torch.tensor([[s.temperature, s.top_p, s.min_p] for s in samplings], dtype=torch.float64)
    temperature, top_p, min_p = numbers.to(logits.device).T[:, :, None]
    x = logits.double()
    x = (x - x.amax(-1, keepdim=True)) / temperature
    x = x - x.logsumexp(-1, keepdim=True)
    cut = x.amax(-1, keepdim=True) + min_p.log()  # -inf if min_p is 0
    if any(0 < s.top_k < vocab or s.top_p < 1.0 for s in samplings):
        ordered = x.sort(descending=True, stable=True).values
        last = torch.tensor([[(s.top_k if 0 < s.top_k < vocab else vocab) - 1] for s in samplings], device=x.device)
        least = ordered.gather(1, last)
        mass = torch.where(ordered >= least, ordered.exp(), 0.0).cumsum(-1)
        reached = mass >= top_p * mass[:, -1:]  # its own last sum, as in protocol.sampling
        nucleus = ordered.gather(1, reached.int().argmax(-1, keepdim=True))
        cut = cut.maximum(torch.where(top_p < 1.0, nucleus.maximum(least), least))
    return torch.where(x >= cut, x, float("-inf"))  # not normalised again: that does not change the argmax


def _noise_keys(samplings: Sequence[Sampling], positions: Sequence[int], device: torch.device) -> Tensor:
    """Compute outrider_core.protocol.noise.noise_key of several draws: int64 [n] that hold 32 bits."""
    pairs = zip(samplings, positions, strict=True)
    low, high, position = torch.tensor([[s.seed & _MASK, s.seed >> 32, at & _MASK] for s, at in pairs], device=device).T
    key = _fmix32(_fmix32(low + 0x9E3779B9 & _MASK) ^ high)
    return _fmix32(key ^ _fmix32(position + 0x7F4A7C15 & _MASK))


def _fmix32(h: Tensor) -> Tensor:
    """Compute outrider_core.protocol.noise.fmix32 on int64 that hold 32 bits."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B & _MASK
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35 & _MASK
    return h ^ (h >> 16)


def _gumbel(keys: Tensor, vocab: int) -> Tensor:
    """Compute outrider_core.protocol.noise.gumbel_noise for several keys: float64 [len(keys), vocab]."""
    tokens = _fmix32(torch.arange(vocab, device=keys.device) + 0x9E3779B9 & _MASK)
    h = _fmix32(tokens[None] ^ keys[:, None])
    return -torch.log(-torch.log((h.double() + 0.5) / 4294967296.0))
