"""Shapes of a Mixture-of-Attentions drafter. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from outrider_core.models.target import head_dim_of, longest_text


class DrafterError(RuntimeError):
    """A drafter folder cannot be used. The message is one line that says what to do."""


#: Tensors that the server half needs; all others belong to the device. Both sides have the cross-attention's input
#: norm: the paper sends keys/values and queries through the same norm.
SERVER_PREFIXES = (
    "layer_self_attention.",
    "Ekv2E.",
    "cross_attention.input_layernorm.",
    "cross_attention.self_attn.k_proj.",
    "cross_attention.self_attn.v_proj.",
)
#: a drafter's confidence temperature is between these
TEMPERATURE_RANGE = (0.05, 20.0)


def check_temperature(value: Any) -> None:
    """Raise DrafterError unless `value` can be a drafter's confidence temperature."""
    low, high = TEMPERATURE_RANGE
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise DrafterError(f"confidence_temperature must be a number from {low:g} to {high:g}, not {value!r}")


@dataclass(frozen=True)
class MoAConfig:
    """Shapes of a MoA drafter. Widths are in values, never in bytes."""

    target_hash: str  # the `model_identity` of the target it was trained on
    target_layers: tuple[int, ...]  # target layers whose K and V layer self-attention reads
    target_kv_heads: int
    target_head_dim: int
    vocab_size: int
    draft_vocab_size: int  # rows of the device's LM head; a map to target ids goes with the weights
    hidden_size: int  # the target's: embedding and LM head are the target's own, frozen
    lsa_heads: int
    lsa_kv_heads: int
    lsa_mlp: int
    heads: int  # of self-attention and cross-attention
    head_dim: int
    sa_kv_heads: int
    sa_mlp: int
    ca_kv_heads: int
    ca_mlp: int
    rope_theta: float
    norm_eps: float
    max_context: int
    null_row: bool  # cross-attention sees one learned row besides the text's; the authors' checkpoints have none
    final_norm: bool  # a norm before the LM head; the authors' checkpoints have none
    #: Not a shape, and not part of the drafter's hash. In greedy decoding, devices divide logits by it, so that a
    #: token's probability is how often it is the target's choice.
    confidence_temperature: float = 1.0

    @property
    def kv_width(self) -> int:
        """D: one target layer's concatenated K and V of one token (papers: 2 * G * hd)."""
        return 2 * self.target_kv_heads * self.target_head_dim

    def check(self) -> None:
        """Raise DrafterError if widths do not fit together."""
        check_temperature(self.confidence_temperature)
        if self.kv_width % self.lsa_heads or (self.kv_width // self.lsa_heads) % 2:
            raise DrafterError(f"lsa_heads {self.lsa_heads} must cut {self.kv_width} into even head widths")
        for name, kv_heads, heads in (
            ("lsa_kv_heads", self.lsa_kv_heads, self.lsa_heads),
            ("sa_kv_heads", self.sa_kv_heads, self.heads),
            ("ca_kv_heads", self.ca_kv_heads, self.heads),
        ):
            if kv_heads < 1 or heads % kv_heads:
                raise DrafterError(f"{name} {kv_heads} must divide the {heads} query heads")
        if self.head_dim % 2:
            raise DrafterError(f"head_dim {self.head_dim} must be even for rotary positions")

    def check_fits(self, shape: Any, name: str) -> None:
        """Raise DrafterError unless the widths are those of target `name`. shape: its config, of any library."""
        wanted = (self.target_kv_heads, self.target_head_dim, self.hidden_size, self.vocab_size)
        given = (shape.num_key_value_heads, head_dim_of(shape), shape.hidden_size, shape.vocab_size)
        if wanted != given or not all(0 <= layer < shape.num_hidden_layers for layer in self.target_layers):
            raise DrafterError(f"the drafter's shapes {wanted} do not fit {name}'s {given}")

    @classmethod
    def for_target(
        cls,
        config: Any,
        target_hash: str,
        *,
        layers: int = 6,
        draft_vocab: int = 12288,
        max_context: int = 2048,
    ) -> MoAConfig:
        """Return default shapes for a target: its own head layout and MLP width, `layers` evenly spaced layers."""
        depth = config.num_hidden_layers
        layers = min(layers, depth)
        chosen = tuple(depth - 1 - round(i * (depth - 1) / max(1, layers - 1)) for i in range(layers))[::-1]
        head_dim = head_dim_of(config)
        kv_heads = config.num_key_value_heads
        width = 2 * kv_heads * head_dim
        rope = getattr(config, "rope_parameters", None) or {}
        return cls(
            target_hash=target_hash,
            target_layers=chosen,
            target_kv_heads=kv_heads,
            target_head_dim=head_dim,
            vocab_size=config.vocab_size,
            draft_vocab_size=min(draft_vocab, config.vocab_size),
            hidden_size=config.hidden_size,
            lsa_heads=2 * kv_heads,
            lsa_kv_heads=2 * kv_heads,
            lsa_mlp=width,
            heads=config.num_attention_heads,
            head_dim=head_dim,
            sa_kv_heads=kv_heads,
            sa_mlp=config.intermediate_size,
            ca_kv_heads=kv_heads,
            ca_mlp=config.intermediate_size,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            norm_eps=config.rms_norm_eps,
            max_context=min(max_context, longest_text(config)),
            null_row=True,
            final_norm=True,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MoAConfig:
        given = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        if missing := {field.name for field in fields(cls)} - given.keys():
            raise DrafterError(f"drafter config lacks {', '.join(sorted(missing))}")
        config = cls(**{**given, "target_layers": tuple(given["target_layers"])})
        config.check()
        return config
