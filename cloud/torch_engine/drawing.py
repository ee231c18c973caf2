"""Draw the target's tokens from rows of logits, on the device that holds them.

On the CPU `cloud.drawing` is used, row by row: in a trial numpy was several times as fast as torch. On a GPU the same
rule runs there for all rows together, so that only token ids travel. Both give the same tokens; tests compare them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cloud.acceptance import NO_TOKEN, Chances
from cloud.drawing import HostLogits
from outrider_core.protocol.constraint import Adjustment
from outrider_core.protocol.noise import noise_key
from outrider_core.protocol.sampling import Sampling

_MASK = 0xFFFFFFFF


class TorchLogits:
    """`cloud.runner.Logits` on a device: values [n, vocab] in any float format."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @torch.inference_mode()
    def draw(
        self,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        adjustments: Sequence[Adjustment | None] = (),
    ) -> list[int]:
        """See Logits.draw."""
        return draw_tokens(self.values[list(rows)], samplings, positions, adjustments)

    @torch.inference_mode()
    def chances(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[Chances]:
        """See Logits.chances. The rows travel to the host."""
        host = HostLogits(self.values[list(rows)].to("cpu", torch.float64).numpy())
        return host.chances(range(len(rows)), tokens, top)


def draw_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    adjustments: Sequence[Adjustment | None] = (),
) -> list[int]:
    """One token per row of logits [n, vocab], adjusted and drawn for absolute position positions[i].

    NO_TOKEN where a row's largest logit is not a finite number, as it is not where any of them is NaN.
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
    """The same on the logits' own device, in float64; [n, vocab] float32 or float64."""
    if any(adjustment is not None for adjustment in adjustments):
        logits = _adjusted(logits, adjustments)
    tokens = _first_argmax(logits)
    sampled = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if sampled:
        scores = torch.stack([_log_probs(logits[row], samplings[row]) for row in sampled])
        keys = torch.tensor([noise_key(samplings[row].seed, positions[row]) for row in sampled], device=logits.device)
        tokens[sampled] = _first_argmax(scores + _gumbel(keys, logits.shape[1]))
    drawn: list[int] = torch.where(logits.amax(-1).isfinite(), tokens, NO_TOKEN).tolist()
    return drawn


def _adjusted(logits: Tensor, adjustments: Sequence[Adjustment | None]) -> Tensor:
    """outrider_core.protocol.constraint.adjusted for rows [n, vocab], in torch: a copy in float64."""
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
    """argmax over the last axis; ties go to the lowest id, on every device."""
    ids = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), ids, x.shape[-1]).amin(-1)


def _log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """outrider_core.protocol.sampling.log_probs for one row [vocab], not greedy, in torch."""
    x = logits.double()
    x = (x - x.max()) / sampling.temperature
    x = x - torch.logsumexp(x, -1)
    cut = x.new_tensor(float("-inf"))
    if 0 < sampling.top_k < len(x):
        cut = torch.maximum(cut, x.topk(sampling.top_k).values[-1])
    if sampling.top_p < 1.0:
        ordered = x.sort(descending=True, stable=True).values
        kept = torch.where(ordered >= cut, ordered.exp(), 0.0)
        mass = kept.cumsum(0)
        reached = mass >= sampling.top_p * mass[-1]  # its own last sum, as in protocol.sampling
        cut = torch.maximum(cut, ordered[reached.int().argmax()])
    if sampling.min_p > 0.0:
        cut = torch.maximum(cut, x.max() + x.new_tensor(sampling.min_p).log())
    return torch.where(x >= cut, x, float("-inf"))  # not normalised again: that moves no argmax


def _fmix32(h: Tensor) -> Tensor:
    """outrider_core.protocol.noise.fmix32 on int64 that hold 32 bits."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B & _MASK
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35 & _MASK
    return h ^ (h >> 16)


def _gumbel(keys: Tensor, vocab: int) -> Tensor:
    """outrider_core.protocol.noise.gumbel_noise for several keys: float64 [len(keys), vocab]."""
    tokens = _fmix32(torch.arange(vocab, device=keys.device) + 0x9E3779B9 & _MASK)
    h = _fmix32(tokens[None] ^ keys[:, None])
    return -torch.log(-torch.log((h.double() + 0.5) / 4294967296.0))
