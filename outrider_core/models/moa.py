"""The Mixture-of-Attentions (MoA) drafter, cut where it is narrowest (arXiv 2410.03804).

Server half (encoder), one pass per *verified* token, no state between tokens:

    K and V of several target layers -> layer self-attention -> mean over layers -> Ekv2E
    -> cross-attention K and V projections = one feature row

Device half (drafter), one pass per *draft* token:

    token embedding -> self-attention block -> cross-attention block over feature rows -> norm -> LM head

Every width is explicit configuration, independent of the target's own head counts. Module and tensor names follow the
authors' checkpoints (`layer_self_attention.*`, `Ekv2E.*`, `self_attention.*`, `cross_attention.*`). Beyond the paper,
cross-attention always sees one learned *null row*, so that the device can draft before any feature row has arrived and
in conversations begun offline; a checkpoint of the authors' has none and is fed zeros until the first row. And there is
a norm before the LM head, as in the target; theirs have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider_core.models.device_arrays import check_draft_ids
from outrider_core.models.layers import Block, adopt_tables, rotary, rotate, tables_of
from outrider_core.models.moa_config import SERVER_PREFIXES, DrafterError, MoAConfig


class KeyValue(nn.Module):
    """The key and value projections of an attention whose queries are elsewhere."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)


class CrossAttentionKeys(nn.Module):
    """The part of the cross-attention block that runs on the server: input norm, keys and values."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = KeyValue(width, inner)


class ServerHalf(nn.Module):
    """K and V of the target's layers -> feature rows (layer self-attention, Ekv2E, cross-attention keys and values)."""

    def __init__(self, config: MoAConfig) -> None:
        super().__init__()
        self.config, width = config, config.kv_width
        head_dim = width // config.lsa_heads
        self.layer_self_attention = Block(
            width, config.lsa_heads, config.lsa_kv_heads, head_dim, config.lsa_mlp, config.norm_eps
        )
        self.Ekv2E = nn.Linear(width, config.hidden_size, bias=True)
        inner = config.ca_kv_heads * config.head_dim
        self.cross_attention = CrossAttentionKeys(config.hidden_size, inner, config.norm_eps)

    def forward(self, kv: Tensor, positions: Tensor) -> Tensor:
        """kv [T, layers, kv_width], absolute positions [T] -> rows [T, 2 (K, V), ca_kv_heads, head_dim].

        kv holds, per key head, the key (after rotary embedding) then the value: [K_0|V_0|K_1|V_1|...].
        Keys in the rows are rotated: positions are absolute, so the device need not do it.
        """
        return self.rows(self.known(kv), positions)

    def known(self, kv: Tensor) -> Tensor:
        """Return what a row is made of [T, hidden_size]: layer self-attention, the mean over layers, Ekv2E."""
        config, block = self.config, self.layer_self_attention
        x = block.input_layernorm(kv)
        cos, sin = rotary(torch.arange(kv.shape[1], device=kv.device), block.self_attn.head_dim, config.rope_theta)
        q, k = rotate(block.self_attn.query(x), cos, sin), rotate(block.self_attn.key(x), cos, sin)
        pooled = block.finish(kv, block.self_attn.attend(q, k, block.self_attn.value(x), None)).mean(1)
        known: Tensor = self.Ekv2E(pooled)
        return known

    def rows(self, known: Tensor, positions: Tensor) -> Tensor:
        """Project `known` [T, hidden_size] to rows, see `forward`."""
        config, u = self.config, self.cross_attention.input_layernorm(known)
        shape = (config.ca_kv_heads, config.head_dim)
        key = self.cross_attention.self_attn.k_proj(u).unflatten(-1, shape)
        value = self.cross_attention.self_attn.v_proj(u).unflatten(-1, shape)
        key = rotate(key, *rotary(positions, config.head_dim, config.rope_theta))
        return torch.stack([key, value], 1)


Angles = tuple[Tensor, Tensor]


def see_own(
    block: Block, x: Tensor, angles: Angles, past_keys: Tensor, past_values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Self-attention of the device's tokens [B, n, hidden_size]; -> (x, new keys, new values)."""
    attn, u = block.self_attn, block.input_layernorm(x)
    key, value = rotate(attn.key(u), *angles), attn.value(u)
    query = rotate(attn.query(u), *angles)
    return block.finish(x, attn.attend_past(query, past_keys, past_values, key, value, mask)), key, value


def read_rows(block: Block, x: Tensor, angles: Angles, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Cross-attention of the device's tokens [B, n, hidden_size] over feature rows."""
    query = rotate(block.self_attn.query(block.input_layernorm(x)), *angles)
    return block.finish(x, block.self_attn.attend(query, keys, values, mask))


class DeviceHalf(nn.Module):
    """Draft tokens -> logits over the draft vocabulary (self-attention, cross-attention; TLI 0)."""

    draft_ids: Tensor  # [draft_vocab] int32: target ids of the LM head's rows

    def __init__(self, config: MoAConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.norm_eps
        shape = (config.heads, config.sa_kv_heads, config.head_dim)
        self.self_attention = Block(width, *shape, config.sa_mlp, eps)
        shape = (config.heads, config.ca_kv_heads, config.head_dim)
        self.cross_attention = Block(width, *shape, config.ca_mlp, eps)
        # keys and values of verified tokens are the server half's work
        del self.cross_attention.self_attn.k_proj, self.cross_attention.self_attn.v_proj
        shape = (2, config.ca_kv_heads, config.head_dim)
        self.null_row = nn.Parameter(torch.zeros(shape)) if config.null_row else None
        self.norm = nn.RMSNorm(width, eps) if config.final_norm else None
        self.embedding = nn.Embedding(config.vocab_size, width)  # frozen, the target's
        self.head = nn.Linear(width, config.draft_vocab_size, bias=False)  # frozen, rows of the target's
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size, dtype=torch.int32))

    @property
    def cache_heads(self) -> int:
        """Heads of the keys and values that a device caches of its tokens."""
        return self.config.sa_kv_heads

    def with_null_row(self, rows: Tensor) -> Tensor:
        """Put the null row before rows [m, 2, ca_kv_heads, head_dim], as `forward` expects.

        A drafter without a null row sees zeros as long as there is no row, which adds nothing to its states.
        """
        if self.null_row is None:
            return rows if len(rows) else rows.new_zeros(1, *rows.shape[1:])
        return torch.cat([self.null_row[None].to(rows.dtype), rows])

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
        """The drafter up to (not including) the LM head, for a batch of B sequences.

        tokens, positions [B, n] int64; sa_mask additive [B, n, past + n]; sa_keys, sa_values
        [B, past, sa_kv_heads, head_dim]; row_keys, row_values [B, m, ca_kv_heads, head_dim], the null row
        among them; row_mask additive [B, n, m] or None: every query sees every row.
        Returns (hidden [B, n, hidden_size], new keys, new values [B, n, sa_kv_heads, head_dim]).
        """
        angles = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x, key, value = see_own(self.self_attention, self.embedding(tokens), angles, sa_keys, sa_values, sa_mask)
        x = read_rows(self.cross_attention, x, angles, row_keys, row_values, row_mask)
        return x if self.norm is None else self.norm(x), key, value

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor,
        sa_mask: Tensor,
        sa_keys: Tensor,
        sa_values: Tensor,
        row_keys: Tensor,
        row_values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one draft step of one sequence, the shape that is exported. All state is the caller's.

        tokens, positions [n] int64; wanted [w] int64, indices of the tokens whose logits are needed; sa_mask additive
        float [n, past + n]; sa_keys, sa_values [past, sa_kv_heads, head_dim]; row_keys, row_values [m, ca_kv_heads,
        head_dim], m >= 1: the caller includes the null row.
        Returns (logits [w, draft_vocab], new keys, new values [n, sa_kv_heads, head_dim]).
        """
        x, key, value = self.hidden(
            tokens[None], positions[None], sa_mask[None], sa_keys[None], sa_values[None], row_keys[None],
            row_values[None], None,
        )  # fmt: skip
        return self.head(x[0, wanted]), key[0], value[0]


class MoA(nn.Module):
    """Both halves together, for training; `server` and `device` are views of one set of weights."""

    def __init__(self, config: MoAConfig, device_half: DeviceHalf | None = None) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.server, self.device_half = ServerHalf(config), device_half or DeviceHalf(config)
        self.server.cross_attention.input_layernorm = self.device_half.cross_attention.input_layernorm
        self.device_half.embedding.requires_grad_(False)
        self.device_half.head.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.server.Ekv2E.bias)

    @property
    def head(self) -> nn.Linear:
        """The frozen LM head: states -> logits over the draft vocabulary."""
        return self.device_half.head

    def rows(self, kv: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return the rows of tokens at `positions` [T], see ServerHalf.forward; of `hidden` they hold nothing."""
        rows: Tensor = self.server(kv, positions)
        return rows

    def states(self, tokens: Tensor, kv: Tensor, hidden: Tensor, causal: Tensor, row_mask: Tensor) -> Tensor:
        """States before the LM head [B, S, hidden_size] of whole texts, every position with its own lag (for training).

        tokens [B, S] int64; kv [B, S, layers, kv_width], hidden [B, S, hidden_size] the target's; causal additive
        [1, S, S]; row_mask additive [B, S, S + 1]: which feature rows a query sees, column 0 is the null row.
        """
        count, size = tokens.shape
        positions = torch.arange(size, device=tokens.device)
        rows = self.rows(kv.flatten(0, 1), hidden.flatten(0, 1), positions.repeat(count)).unflatten(0, (count, size))
        assert self.device_half.null_row is not None, "drafters are trained with a null row"
        rows = torch.cat([self.device_half.null_row.to(rows.dtype).expand(count, 1, -1, -1, -1), rows], 1)
        empty = rows.new_zeros(count, 0, self.device_half.cache_heads, self.config.head_dim)
        keys, values = rows.unbind(2)
        positions = positions.expand(count, size)
        return self.device_half.hidden(tokens, positions, causal, empty, empty, keys, values, row_mask)[0]

    def adopt(self, target_model: Any, draft_ids: Tensor) -> None:
        """Take the target's embedding and the LM head rows of `draft_ids` [draft_vocab] (frozen)."""
        device = self.device_half
        adopt_tables(device.embedding, device.head, device.draft_ids, tables_of(target_model), draft_ids)

    def trained(self) -> dict[str, Tensor]:
        """Trained tensors under the checkpoint's names, plus the draft vocabulary map."""
        tensors = {k: v for k, v in self.device_half.state_dict().items() if not k.startswith(("embedding.", "head."))}
        return {**self.server.state_dict(), **tensors}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the weights of an earlier drafter of these shapes, named as by `trained`. Raises DrafterError."""
        for name, own in self.trained().items():
            if name not in tensors or tensors[name].shape != own.shape:
                raise DrafterError(f"drafter weights do not fit their config: {name} is missing or has another shape")
            own.copy_(tensors[name])


def server_half(config: MoAConfig, tensors: dict[str, Tensor]) -> ServerHalf:
    """Build the frozen server half from a drafter's tensors (or from `encoder.safetensors`)."""
    half = ServerHalf(config)
    _load(half, {k: v for k, v in tensors.items() if k.startswith(SERVER_PREFIXES)})
    return half


def device_half(config: MoAConfig, tensors: dict[str, Tensor], target_model: Any) -> DeviceHalf:
    """Build the frozen device half from a drafter's tensors and a loaded target's embedding and LM head."""
    return device_half_on(config, tensors, *tables_of(target_model))


def device_half_on(config: MoAConfig, tensors: dict[str, Tensor], embedding: Tensor, lm_head: Tensor) -> DeviceHalf:
    """Build the same from the target's tables, each [vocab, hidden_size]."""
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise DrafterError(
            f"the target's embedding is {tuple(embedding.shape)}, the drafter was made for "
            f"{(config.vocab_size, config.hidden_size)}; give the target it was trained on"
        )
    check_draft_ids(config, {name: tensor.numpy() for name, tensor in tensors.items() if name == "draft_ids"})
    ids = tensors["draft_ids"]
    with torch.device("meta"):
        half = DeviceHalf(config)
    own = {k: v for k, v in tensors.items() if k in half.state_dict()}
    own["embedding.weight"] = embedding.float()
    whole = torch.equal(ids.long(), torch.arange(len(lm_head)))
    own["head.weight"] = lm_head.float() if whole else lm_head[ids.long()].float()
    _load(half, own)
    return half


def device_half_of(config: MoAConfig, arrays: Mapping[str, NDArray[Any]]) -> DeviceHalf:
    """Build the same from `device_arrays`, whose memory it shares."""
    with torch.device("meta"):
        half = DeviceHalf(config)
    _load(half, {name: torch.from_numpy(array) for name, array in arrays.items()})
    return half


def _load(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    try:
        wanted = {name: tensor.dtype for name, tensor in module.state_dict().items()}
        # Detached, so that the module gets parameters of its own: the target's tables must not change with it.
        owned = {name: tensor.detach().to(wanted.get(name, tensor.dtype)) for name, tensor in tensors.items()}
        module.load_state_dict(owned, assign=True)
    except RuntimeError as error:
        raise DrafterError("drafter weights do not fit their config: " + str(error).splitlines()[-1].strip()) from None
    module.requires_grad_(False).eval()
