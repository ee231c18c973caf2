"""Variants of MoA with one change: another input of its tokens, of its rows, or rows of fewer bits.

Fused, a token also takes in the values of the newest feature row that it sees, through a linear layer. That is before
the self-attention, where EAGLE-3 takes in the target's state of the token before, or behind it, so that what a device
caches of its tokens depends on no row. Rows keep their length, and nothing is recursive.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lab.baselines.networks import begin_small
from outrider_core.models.layers import rotary
from outrider_core.models.moa import DeviceHalf, MoA, read_rows, see_own
from outrider_core.models.moa_config import MoAConfig

Place = Literal["input", "query", "nowhere"]


class FusedHalf(DeviceHalf):
    """The device half that adds the newest visible row to its tokens, before the self-attention or behind it."""

    def __init__(self, config: MoAConfig, place: Place) -> None:
        super().__init__(config)
        self.place = place
        self.fuse: nn.Linear | None = None
        if place != "nowhere":
            self.fuse = nn.Linear(config.ca_kv_heads * config.head_dim, config.hidden_size, bias=False)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        sa_mask: Tensor,
        sa_keys: Tensor,
        sa_values: Tensor,
        row_keys: Tensor,
        row_values: Tensor,
        row_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See DeviceHalf.hidden. Rows that a query sees stand before those that it does not.

        Without `row_mask` the rows are those of the first tokens, and a token reads none of its own or of later ones.
        """
        if self.fuse is None:
            return super().hidden(tokens, positions, sa_mask, sa_keys, sa_values, row_keys, row_values, row_mask)
        values = row_values.flatten(2)
        last = positions.clamp(max=values.shape[1] - 1) if row_mask is None else (row_mask == 0).sum(-1) - 1
        newest = self.fuse(torch.take_along_dim(values, last[..., None], 1))
        angles = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = self.embedding(tokens)
        if self.place == "input":
            x = x + newest
        x, key, value = see_own(self.self_attention, x, angles, sa_keys, sa_values, sa_mask)
        if self.place == "query":
            x = x + newest
        x = read_rows(self.cross_attention, x, angles, row_keys, row_values, row_mask)
        return x if self.norm is None else self.norm(x), key, value


class FusedMoA(MoA):
    """MoA whose tokens take in the newest row. Subclasses change one thing each.

    place: where the newest row is read. with_hidden: rows are also made of the target's last hidden state. bits: that a
    row's values are rounded to, in training too; 0: they are not.
    """

    place: Place = "input"
    with_hidden = False
    bits = 0

    def __init__(self, config: MoAConfig) -> None:
        super().__init__(config, FusedHalf(config, self.place))
        self.last = nn.Linear(config.hidden_size, config.hidden_size, bias=False) if self.with_hidden else None
        if self.last is not None:
            begin_small(self.last)

    def rows(self, kv: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """See MoA.rows."""
        known = self.server.known(kv)
        if self.last is not None:
            known = known + self.last(hidden.to(known.dtype))
        rows = self.server.rows(known, positions)
        return rounded(rows, self.bits) if self.bits else rows

    def trained(self) -> dict[str, Tensor]:
        """See MoA.trained."""
        own = {} if self.last is None else {"last.weight": self.last.weight.detach()}
        return {**super().trained(), **own}


class FusedHiddenMoA(FusedMoA):
    """Fused, with the target's last hidden state in its rows."""

    with_hidden = True


class FusedQueryMoA(FusedMoA):
    """Fused behind the self-attention."""

    place = "query"


class Rows4MoA(FusedMoA):
    """MoA with rows of 4 bits, as they travel."""

    place = "nowhere"
    bits = 4


class Rows6MoA(FusedMoA):
    """MoA with rows of 6 bits."""

    place = "nowhere"
    bits = 6


def rounded(rows: Tensor, bits: int) -> Tensor:
    """Round rows [..., head_dim] to `bits` bits a value, as on the wire; gradients pass unchanged."""
    most = 2 ** (bits - 1) - 1
    scale = (rows.detach().abs().amax(-1, keepdim=True) / most).clamp(min=1e-8)
    return rows + ((rows / scale).round() * scale - rows).detach()
