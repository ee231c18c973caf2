"""The drafter's server half in numpy: `outrider_core.models.moa.ServerHalf` without torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from outrider_core.models.moa_config import DrafterError, MoAConfig
from outrider_core.protocol.rows import RowShape

Floats = NDArray[np.float32]


class HostFeatures:
    """Computes feature rows of verified tokens. tensors: the drafter's, by name, float32."""

    def __init__(self, config: MoAConfig, tensors: Mapping[str, Floats]) -> None:
        self.shape = RowShape(config.ca_kv_heads, config.head_dim)
        self.layers = config.target_layers
        self._config = config
        block, cross = "layer_self_attention", "cross_attention"
        wanted = [f"{block}.self_attn.{name}_proj.weight" for name in "qkvo"]
        wanted += [f"{block}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        wanted += [f"{block}.{name}_layernorm.weight" for name in ("input", "post_attention")]
        wanted += ["Ekv2E.weight", "Ekv2E.bias", f"{cross}.input_layernorm.weight"]
        wanted += [f"{cross}.self_attn.{name}_proj.weight" for name in "kv"]
        if lacking := [name for name in wanted if name not in tensors]:
            raise DrafterError(f"drafter weights do not fit their config: {lacking[0]} is missing")
        self._tensors = {name: tensors[name] for name in wanted}
        # a matrix product's threads would take the cores from the engine's, which wait for each other within a step
        self._one_thread = _OneThread()
        self._layer_angles = _angles(range(len(self.layers)), config.kv_width // config.lsa_heads, config.rope_theta)

    def rows(self, kv: Floats, positions: Sequence[int]) -> Floats:
        """Rows [n, 2, kv_heads, head_dim] of tokens at absolute `positions`: layer self-attention, mean over layers,
        Ekv2E (arXiv 2410.03804). kv [n, layers, kv_width]: keys and values of `layers`, as `OnnxRunner.gather` has
        them."""
        with self._one_thread:
            return self._rows(kv, positions)

    def _rows(self, kv: Floats, positions: Sequence[int]) -> Floats:
        config, block = self._config, "layer_self_attention"
        count, layers, width = kv.shape
        x = self._norm(kv, f"{block}.input_layernorm")
        head_dim = width // config.lsa_heads
        query, key, value = (
            self._linear(x, f"{block}.self_attn.{name}_proj").reshape(count, layers, -1, head_dim) for name in "qkv"
        )
        query, key = _rotate(query, *self._layer_angles), _rotate(key, *self._layer_angles)
        group = config.lsa_heads // config.lsa_kv_heads
        folded = query.transpose(0, 2, 1, 3).reshape(count, config.lsa_kv_heads, group * layers, head_dim)
        scores = folded @ key.transpose(0, 2, 3, 1) * np.float32(head_dim**-0.5)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ value.transpose(0, 2, 1, 3)).reshape(count, config.lsa_heads, layers, head_dim)
        x = kv + self._linear(mixed.transpose(0, 2, 1, 3).reshape(count, layers, -1), f"{block}.self_attn.o_proj")
        inner = self._norm(x, f"{block}.post_attention_layernorm")
        gate, up = (self._linear(inner, f"{block}.mlp.{name}_proj") for name in ("gate", "up"))
        x = x + self._linear(gate / (1 + np.exp(-gate)) * up, f"{block}.mlp.down_proj")
        pooled = self._linear(x.mean(1), "Ekv2E") + self._tensors["Ekv2E.bias"]
        u = self._norm(pooled, "cross_attention.input_layernorm")
        shape = (count, config.ca_kv_heads, config.head_dim)
        row_keys, row_values = (
            self._linear(u, f"cross_attention.self_attn.{name}_proj").reshape(shape) for name in "kv"
        )
        angles = _angles(positions, config.head_dim, config.rope_theta)
        rows: Floats = np.stack([_rotate(row_keys, *angles), row_values], 1, dtype=np.float32)
        return rows

    def _linear(self, x: Floats, name: str) -> Floats:
        weight = self._tensors[f"{name}.weight"]
        product: Floats = x.reshape(-1, weight.shape[1]) @ weight.T  # one product for all of x, not one per token
        return product.reshape(*x.shape[:-1], -1)

    def _norm(self, x: Floats, name: str) -> Floats:
        variance = np.square(x).mean(-1, keepdims=True) + np.float32(self._config.norm_eps)
        normed: Floats = x / np.sqrt(variance) * self._tensors[f"{name}.weight"]
        return normed


class _OneThread:
    """Limits matrix products to one thread. The number is process-wide, so the last one to leave restores it."""

    _lock: ClassVar = threading.Lock()
    _inside: ClassVar[int] = 0
    _limit: ClassVar[Any] = None

    def __init__(self) -> None:
        self._products = ThreadpoolController().select(user_api="blas")

    def __enter__(self) -> None:
        with _OneThread._lock:
            if not _OneThread._inside:
                _OneThread._limit = self._products.limit(limits=1)
            _OneThread._inside += 1

    def __exit__(self, *_: object) -> None:
        with _OneThread._lock:
            _OneThread._inside -= 1
            if not _OneThread._inside:
                # the end of a `with` also lets another thread set limits: until then, those of others do nothing
                _OneThread._limit.__exit__(None, None, None)


def _angles(positions: Sequence[int], head_dim: int, theta: float) -> tuple[Floats, Floats]:
    """(cosines, sines) float32 [n, head_dim], as `outrider_core.models.layers.rotary` has them."""
    inverse = np.power(np.float32(theta), -(np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)))
    angles = np.asarray(positions, np.float32)[:, None] * inverse
    both = np.concatenate([angles, angles], -1)
    cosines: Floats = np.cos(both)
    sines: Floats = np.sin(both)
    return cosines, sines


def _rotate(x: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Rotary positions of x [..., n, heads, head_dim]; cosines, sines [n, head_dim]."""
    half = x.shape[-1] // 2
    turned: Floats = np.concatenate([-x[..., half:], x[..., :half]], -1)
    rotated: Floats = x * cosines[:, None] + turned * sines[:, None]
    return rotated
