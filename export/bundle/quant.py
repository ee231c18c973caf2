"""Weights in blocks of 4 or 8 bits, and the device half rebuilt on them.

The layout is that of ONNX Runtime's MatMulNBits, so that one table serves the LM head and, read row by row,
the token embedding: an embedding tied to the head is stored once. Scales are symmetric, one per output and
block of inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider_core.models.moa import DeviceHalf

BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
#: inputs that share one scale; smaller blocks are closer to float32 and larger on disk
BLOCKS = {4: 32, 8: 64}
#: bits of quantised embedding rows outside the draft vocabulary, at most
RARE_BITS = 4
#: shares of a block's largest weight that are tried as its range; the one of least squared error is taken
RANGES = (1.0, 0.93, 0.86, 0.79, 0.72)
#: rows quantised at once: what is worked on stays in the cache, and the memory of a 128k-row table is bounded
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Profile:
    """How the device half's weights are stored.

    quant: "fp32", "fp16", "int8" or "int4" (linears). embedding_bits: 32, 16, 8 or 4 (embedding and LM head; see
    `embedding` for tokens outside the draft vocabulary).
    """

    quant: str
    embedding_bits: int

    @property
    def bits(self) -> int:
        return BITS[self.quant]


def packed_bytes(weights: int, bits: int) -> int:
    """Bytes of `weights` values in `bits`, and of their float32 scales."""
    return weights * bits // 8 + (weights * 4 // BLOCKS[bits] if bits in BLOCKS else 0)


def quantise(weight: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """weight [N, K] float -> (packed uint8 [N, blocks, block * bits / 8], scales float32 [N, blocks]).

    Values are stored with an offset of 2^(bits - 1), two 4-bit values a byte, the even one low. The largest
    weight of a block maps to the lower end of the range (which reaches one step further than the upper one), and
    ranges a little smaller than it are tried too. The last block is padded with zeros.
    """
    if len(weight) > ROWS_AT_ONCE:
        parts = [quantise(rows, bits, block) for rows in weight.split(ROWS_AT_ONCE)]
        return torch.cat([p for p, _ in parts]), torch.cat([s for _, s in parts])
    half = 2 ** (bits - 1)
    x = nn.functional.pad(weight.detach().float(), (0, -weight.shape[1] % block)).unflatten(1, (-1, block))
    peak = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best_scale, best_error = torch.zeros_like(peak), torch.full_like(peak, torch.inf)
    for share in RANGES if bits < 8 else RANGES[:1]:
        scale = peak * (-share / half)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        error = ((x / scale).round().clamp(-half, half - 1) * scale - x).square().sum(-1, keepdim=True)
        better = error < best_error
        best_scale, best_error = torch.where(better, scale, best_scale), torch.where(better, error, best_error)
    values = ((x / best_scale).round().clamp(-half, half - 1) + half).to(torch.uint8)
    packed = values if bits == 8 else values[..., 0::2] | (values[..., 1::2] << 4)
    return packed, best_scale[..., 0]


def dequantise(packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The inverse: packed [..., blocks, bytes], scales [..., blocks] -> float32 [..., blocks * block].

    Written in float arithmetic only, which every engine has kernels for.
    """
    values = packed.float()
    if bits == 4:
        high = torch.floor(values / 16.0)
        values = torch.stack([values - high * 16.0, high], -1).flatten(-2)
    return ((values - float(2 ** (bits - 1))) * scales[..., None]).flatten(-2)


@torch.library.custom_op("outrider::matmul_nbits", mutates_args=())
def matmul_nbits(x: Tensor, packed: Tensor, scales: Tensor, inputs: int, bits: int, block: int) -> Tensor:
    """x [..., K] @ dequantised [N, K]^T -> [..., N]; becomes one MatMulNBits node in ONNX (export.bundle.to_onnx)."""
    return nn.functional.linear(x, dequantise(packed, scales, bits)[:, :inputs].to(x.dtype))


@matmul_nbits.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, inputs: int, bits: int, block: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


class Table(nn.Module):
    """A float weight [N, K] whose rows can be looked up."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def rows(self, index: Tensor) -> Tensor:
        return self.weight[index].float()

    def product(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


class BlockTable(nn.Module):
    """The same in blocks of `bits`: `rows` for an embedding, `product` for a linear layer."""

    packed: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__()
        self.inputs, self.bits, self.block = weight.shape[1], bits, BLOCKS[bits]
        packed, scales = quantise(weight, bits, self.block)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)

    def rows(self, index: Tensor) -> Tensor:
        return dequantise(self.packed[index], self.scales[index], self.bits)[..., : self.inputs]

    def product(self, x: Tensor) -> Tensor:
        return matmul_nbits(x, self.packed, self.scales, self.inputs, self.bits, self.block)


AnyTable = Table | BlockTable


def table(weight: Tensor, bits: int) -> AnyTable:
    """A table of `bits`: 32, 16, 8 or 4."""
    if bits in BLOCKS:
        return BlockTable(weight, bits)
    return Table(weight.half() if bits == 16 else weight)


class Linear(nn.Module):
    """A bias-free linear layer on a table."""

    def __init__(self, weights: AnyTable) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        return self.weights.product(x)


class Embedding(nn.Module):
    """tokens [...] -> float32 [..., K] from one table of all tokens."""

    def __init__(self, weights: AnyTable) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weights.rows(tokens)


class SharedEmbedding(nn.Module):
    """The same from two tables: `head` has the draft vocabulary's rows (and may be the LM head), `rest` the others."""

    place: Tensor

    def __init__(self, head: AnyTable, rest: AnyTable, place: Tensor) -> None:
        super().__init__()
        self.head, self.rest = head, rest
        self.register_buffer("place", place)  # [vocab] int32: row in head, then in rest
        self.split = int(len(place) - (rest.weight if isinstance(rest, Table) else rest.packed).shape[0])

    def forward(self, tokens: Tensor) -> Tensor:
        place = self.place[tokens].long()
        drafted = self.head.rows(place.clamp(max=self.split - 1))
        other = self.rest.rows((place - self.split).clamp(min=0))
        return torch.where((place < self.split)[..., None], drafted, other)


class DivNorm(nn.Module):
    """RMSNorm as the division that ONNX Runtime fuses into one kernel."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, float(norm.eps or 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def is_tied(half: DeviceHalf) -> bool:
    """Whether the LM head's rows are the embedding's rows of the draft vocabulary."""
    return bool(torch.equal(half.embedding.weight[half.draft_ids.long()], half.head.weight))


def embedding(half: DeviceHalf, profile: Profile, head: AnyTable | None = None) -> nn.Module:
    """The token embedding on tables of `profile`; `head` serves the draft vocabulary's rows if it is given.

    Tokens that the device never drafts are rare, so where values are quantised these rows take RARE_BITS.
    """
    weight, ids, bits = half.embedding.weight, half.draft_ids.long(), profile.embedding_bits
    if len(ids) == len(weight):
        in_order = head is not None and torch.equal(ids, torch.arange(len(weight)))
        return Embedding(head if head is not None and in_order else table(weight, bits))
    if head is None and rare_bits(bits) == bits:
        return Embedding(table(weight, bits))
    rest = torch.ones(len(weight), dtype=torch.bool)
    rest[ids] = False
    place = torch.empty(len(weight), dtype=torch.int32)
    place[ids] = torch.arange(len(ids), dtype=torch.int32)
    place[rest] = torch.arange(len(ids), len(weight), dtype=torch.int32)
    return SharedEmbedding(head or table(weight[ids], bits), table(weight[rest], rare_bits(bits)), place)


def rare_bits(bits: int) -> int:
    """Bits of the embedding outside the draft vocabulary."""
    return min(bits, RARE_BITS) if bits in BLOCKS else bits


def rebuild(half: DeviceHalf, profile: Profile) -> DeviceHalf:
    """A copy of `half` on tables of `profile`; float32 in and out, untied tables share memory with `half`."""
    head_table = table(half.head.weight, profile.embedding_bits)
    embedded = embedding(half, profile, head_table if is_tied(half) else None)
    half = without_tables(half)
    half.head = Linear(head_table)  # type: ignore[assignment]
    half.embedding = embedded  # type: ignore[assignment]
    for module in list(half.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Linear(table(child.weight, profile.bits)))
    replace_norms(half, DivNorm)
    return half


def replace_norms(half: DeviceHalf, kind: Callable[[nn.RMSNorm], nn.Module]) -> None:
    """Put `kind` of each RMSNorm in its place."""
    for module in list(half.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.RMSNorm):
                setattr(module, name, kind(child))


def without_tables(half: DeviceHalf) -> DeviceHalf:
    """A deep copy of everything but the embedding and the LM head, which may hold gigabytes."""
    kept = {id(half.embedding): nn.Identity(), id(half.head): nn.Identity()}
    return copy.deepcopy(half, kept)  # type: ignore[arg-type]
