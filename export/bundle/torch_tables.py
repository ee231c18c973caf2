"""The device half's token embedding in the formats of a profile, by operators that ExecuTorch lowers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from export.bundle.blocks import BLOCKS, Profile, places, quantise, rare_bits
from outrider_core.models.moa import DeviceHalf


class Table(nn.Module):
    """A float weight [N, K] whose rows can be looked up, in float32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index].float()


class BlockTable(nn.Module):
    """The same in blocks of `bits`, computed in float arithmetic only, which every backend supports."""

    packed: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__()
        self.inputs, self.bits = weight.shape[1], bits
        packed, scales = quantise(weight.detach().float().numpy(), bits)
        self.register_buffer("packed", torch.from_numpy(packed))
        self.register_buffer("scales", torch.from_numpy(scales))

    def forward(self, index: Tensor) -> Tensor:
        values, scales = self.packed[index].float(), self.scales[index]
        if self.bits == 4:
            high = torch.floor(values / 16.0)
            values = torch.stack([values - high * 16.0, high], -1).flatten(-2)
        return ((values - float(2 ** (self.bits - 1))) * scales[..., None]).flatten(-2)[..., : self.inputs]


def table(weight: Tensor, bits: int) -> Table | BlockTable:
    """Return a table of `bits`: 32, 16, 8 or 4."""
    if bits in BLOCKS:
        return BlockTable(weight, bits)
    return Table(weight.half() if bits == 16 else weight)


class SplitEmbedding(nn.Module):
    """Maps tokens [...] to float32 [..., K]: `drafted` has the draft vocabulary's rows, `rest` the others."""

    place: Tensor

    def __init__(self, drafted: nn.Module, rest: nn.Module, place: Tensor, split: int) -> None:
        super().__init__()
        self.drafted, self.rest, self.split = drafted, rest, split
        self.register_buffer("place", place)  # [vocab] int32: row in `drafted`, then in `rest`

    def forward(self, tokens: Tensor) -> Tensor:
        place = self.place[tokens].long()
        drafted = self.drafted(place.clamp(max=self.split - 1))
        other = self.rest((place - self.split).clamp(min=0))
        return torch.where((place < self.split)[..., None], drafted, other)


def embedding(half: DeviceHalf, profile: Profile) -> nn.Module:
    """Return the embedding on tables of `profile`: in blocks, tokens that are never drafted take fewer bits."""
    weight, ids, bits = half.embedding.weight, half.draft_ids.long(), profile.embedding_bits
    if len(ids) == len(weight) or rare_bits(bits) == bits:
        return table(weight, bits)
    place, others = places(ids.numpy(), len(weight))
    rest = table(weight[torch.from_numpy(others)], rare_bits(bits))
    return SplitEmbedding(table(weight[ids], bits), rest, torch.from_numpy(place), len(ids))


def replace_norms(half: DeviceHalf, kind: Callable[[nn.RMSNorm], nn.Module]) -> None:
    """Replace each RMSNorm by its `kind`."""
    for module in list(half.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.RMSNorm):
                setattr(module, name, kind(child))


def without_tables(half: DeviceHalf) -> DeviceHalf:
    """Return a deep copy without the embedding and the LM head, which may hold gigabytes."""
    kept = {id(half.embedding): nn.Identity(), id(half.head): nn.Identity()}
    return copy.deepcopy(half, kept)  # type: ignore[arg-type]
