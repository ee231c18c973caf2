"""The drafter: both halves against plain loops, training against drafting, its configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from export.train.batches import MASKED, TrainingBatch, row_mask_of
from export.train.trainer import forward
from outrider_core.models.layers import Attention
from outrider_core.models.moa import DeviceHalf, MoA
from outrider_core.models.moa_config import DrafterError, MoAConfig
from tests.models.odd_moa import ODD, random_moa, random_sequence

# training equals drafting

#: of logits up to 20
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}


def training_logits(moa: MoA, tokens: Tensor, kv: Tensor, window: int, phase: int) -> tuple[Tensor, Tensor]:
    """The training forward of one whole sequence: (logits [S, draft_vocab], lag [S])."""
    size = len(tokens)
    mask, lag = row_mask_of(size, window, phase)
    causal = torch.full((size, size), MASKED, dtype=kv.dtype).triu(1)[None]
    nothing = torch.zeros(1, size)
    batch = TrainingBatch(
        tokens[None], kv[None], nothing, causal, mask[None].to(kv.dtype), lag[None], nothing, nothing, lag[:0]
    )
    with torch.no_grad():
        return moa.device_half.head(forward(moa, batch)[0]), lag


class Device:
    """What the device does behind root `root`: its caches, the server's rows 0..root-1, one step at a time."""

    def __init__(self, moa: MoA, tokens: Tensor, kv: Tensor, root: int) -> None:
        self.half, self.tokens = moa.device_half, tokens
        config, dtype = moa.config, kv.dtype
        with torch.no_grad():  # row by row, as tokens are verified
            each = [moa.server(kv[j : j + 1], torch.tensor([j])) for j in range(root)]
        self.rows = torch.cat([torch.zeros(0, 2, config.ca_kv_heads, config.head_dim, dtype=dtype), *each])
        self.keys = self.values = torch.zeros(0, config.sa_kv_heads, config.head_dim, dtype=dtype)
        for position in range(root):
            self.step([int(tokens[position])], [position], torch.zeros(1, position + 1, dtype=dtype))

    @torch.no_grad()
    def step(self, tokens: list[int], positions: list[int], mask: Tensor) -> Tensor:
        inputs = torch.tensor(tokens), torch.tensor(positions), torch.arange(len(tokens))
        rows = self.half.with_null_row(self.rows).unbind(1)
        logits, key, value = self.half(*inputs, mask, self.keys, self.values, *rows)
        self.keys, self.values = torch.cat([self.keys, key]), torch.cat([self.values, value])
        return logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("window", "phase", "root"), [(5, 2, 7), (5, 2, 0), (3, 0, 9), (4, 3, 11), (0, 0, 0)])
def test_training_forward_equals_drafting_step_by_step(dtype: torch.dtype, window: int, phase: int, root: int) -> None:
    moa = random_moa(dtype=dtype)
    tokens, kv = random_sequence(ODD, 14, 5, dtype)
    expected, lag = training_logits(moa, tokens, kv, window, phase)
    assert lag[root] == 1 or root == 0  # a window begins here
    stop = min([i for i in range(root + 1, 14) if lag[i] == 1], default=14)
    device = Device(moa, tokens, kv, root)
    for position in range(root, stop):
        logits = device.step([int(tokens[position])], [position], torch.zeros(1, position + 1, dtype=dtype))
        torch.testing.assert_close(logits[0], expected[position], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_forward_equals_drafting_a_tree(dtype: torch.dtype) -> None:
    """Two nodes of each level in one step; the true continuation is a branch among wrong ones."""
    moa, root = random_moa(dtype=dtype), 7
    tokens, kv = random_sequence(ODD, 14, 6, dtype)
    expected, _ = training_logits(moa, tokens, kv, 5, 2)
    device = Device(moa, tokens, kv, root)
    device.step([int(tokens[root])], [root], torch.zeros(1, root + 1, dtype=dtype))
    wrong = [(int(tokens[position]) + 1) % ODD.vocab_size for position in range(14)]
    committed = [*range(root + 1)]
    true_path: list[int] = []  # cache columns of the true branch
    wrong_path: list[int] = []
    for position in range(root + 1, root + 5):
        past = len(device.keys)
        mask = torch.full((2, past + 2), MASKED, dtype=dtype)
        wrong_path.append(past)  # the wrong branch comes first in the cache
        true_path.append(past + 1)
        mask[0, committed + wrong_path] = 0.0
        mask[1, committed + true_path] = 0.0
        logits = device.step([wrong[position], int(tokens[position])], [position, position], mask)
        torch.testing.assert_close(logits[1], expected[position], rtol=0, atol=TOLERANCE[dtype])
        assert (logits[0] - expected[position]).abs().max() > 1e-3


def test_rows_younger_than_the_root_do_not_reach_the_logits() -> None:
    """The converse of the equivalence: with one row more, drafting gives something else."""
    moa = random_moa()
    tokens, kv = random_sequence(ODD, 14, 5, torch.float64)
    expected, _ = training_logits(moa, tokens, kv, 5, 2)
    device = Device(moa, tokens, kv, 7)
    device.rows = torch.cat([device.rows, device.rows[-1:] + 1.0])
    logits = device.step([int(tokens[7])], [7], torch.zeros(1, 8, dtype=torch.float64))
    assert (logits[0] - expected[7]).abs().max() > 1e-3


# the formulas, once more, in plain loops


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turn(head: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotary embedding: dimension i turns with dimension i + d/2."""
    out, half = head.copy(), len(head) // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / len(head))
        a, b = head[i], head[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


def mix(query: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    scores = [float(query @ key) / math.sqrt(len(query)) for key in keys]
    weights = [math.exp(s - max(scores)) for s in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def mlp(x: np.ndarray, w: dict[str, np.ndarray], at: str) -> np.ndarray:
    return w[f"{at}.down_proj.weight"] @ (silu(w[f"{at}.gate_proj.weight"] @ x) * (w[f"{at}.up_proj.weight"] @ x))


def reference_row(w: dict[str, np.ndarray], c: MoAConfig, kv: np.ndarray, position: int) -> np.ndarray:
    """kv [layers, kv_width] -> row [2, ca_kv_heads, head_dim]."""
    at, width = "layer_self_attention", c.kv_width // c.lsa_heads
    u = [norm(x, w[f"{at}.input_layernorm.weight"], c.norm_eps) for x in kv]
    q, k, v = ([(w[f"{at}.self_attn.{n}_proj.weight"] @ x).reshape(-1, width) for x in u] for n in "qkv")
    out = np.zeros(c.kv_width)
    for layer in range(len(kv)):
        heads = []
        for head in range(c.lsa_heads):
            shared = head // (c.lsa_heads // c.lsa_kv_heads)
            keys = [turn(k[other][shared], other, c.rope_theta) for other in range(len(kv))]
            values = [v[other][shared] for other in range(len(kv))]
            heads.append(mix(turn(q[layer][head], layer, c.rope_theta), keys, values))
        x = kv[layer] + w[f"{at}.self_attn.o_proj.weight"] @ np.concatenate(heads)
        x = x + mlp(norm(x, w[f"{at}.post_attention_layernorm.weight"], c.norm_eps), w, f"{at}.mlp")
        out += x / len(kv)
    e = w["Ekv2E.weight"] @ out + w["Ekv2E.bias"]
    e = norm(e, w["cross_attention.input_layernorm.weight"], c.norm_eps)
    key = (w["cross_attention.self_attn.k_proj.weight"] @ e).reshape(c.ca_kv_heads, c.head_dim)
    value = (w["cross_attention.self_attn.v_proj.weight"] @ e).reshape(c.ca_kv_heads, c.head_dim)
    return np.stack([np.stack([turn(head, position, c.rope_theta) for head in key]), value])


def reference_logits(w: dict[str, np.ndarray], c: MoAConfig, tokens: list[int], rows: list[np.ndarray]) -> np.ndarray:
    """Logits behind the last token, all rows and the null row (if there is one) visible."""
    at, last = "self_attention", len(tokens) - 1
    embedded = [w["embedding.weight"][token] for token in tokens]
    u = [norm(x, w[f"{at}.input_layernorm.weight"], c.norm_eps) for x in embedded]
    q = (w[f"{at}.self_attn.q_proj.weight"] @ u[last]).reshape(c.heads, c.head_dim)
    k = [(w[f"{at}.self_attn.k_proj.weight"] @ x).reshape(-1, c.head_dim) for x in u]
    v = [(w[f"{at}.self_attn.v_proj.weight"] @ x).reshape(-1, c.head_dim) for x in u]
    heads = []
    for head in range(c.heads):
        shared = head // (c.heads // c.sa_kv_heads)
        keys = [turn(k[i][shared], i, c.rope_theta) for i in range(len(tokens))]
        heads.append(mix(turn(q[head], last, c.rope_theta), keys, [value[shared] for value in v]))
    x = embedded[last] + w[f"{at}.self_attn.o_proj.weight"] @ np.concatenate(heads)
    x = x + mlp(norm(x, w[f"{at}.post_attention_layernorm.weight"], c.norm_eps), w, f"{at}.mlp")

    at = "cross_attention"
    u_last = norm(x, w[f"{at}.input_layernorm.weight"], c.norm_eps)
    q = (w[f"{at}.self_attn.q_proj.weight"] @ u_last).reshape(c.heads, c.head_dim)
    seen = [w["null_row"], *rows] if c.null_row else rows
    heads = []
    for head in range(c.heads if seen else 0):
        shared = head // (c.heads // c.ca_kv_heads)
        keys, values = [row[0][shared] for row in seen], [row[1][shared] for row in seen]
        heads.append(mix(turn(q[head], last, c.rope_theta), keys, values))
    if seen:  # what reads nothing adds nothing
        x = x + w[f"{at}.self_attn.o_proj.weight"] @ np.concatenate(heads)
    x = x + mlp(norm(x, w[f"{at}.post_attention_layernorm.weight"], c.norm_eps), w, f"{at}.mlp")
    return w["head.weight"] @ (norm(x, w["norm.weight"], c.norm_eps) if c.final_norm else x)


def arrays(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("ca_kv_heads", [1, 2, 4])
def test_server_half_follows_the_formulas(ca_kv_heads: int) -> None:
    config = replace(ODD, ca_kv_heads=ca_kv_heads)
    moa = random_moa(config)
    _, kv = random_sequence(config, 4, 1, torch.float64)
    positions = [0, 1, 17, 60]
    got = moa.server(kv, torch.tensor(positions)).detach().numpy()
    weights = arrays(moa.server)
    expected = [reference_row(weights, config, x.numpy(), p) for x, p in zip(kv, positions, strict=True)]
    # angles and softmax are float32
    np.testing.assert_allclose(got, np.stack(expected), atol=2e-5)


@pytest.mark.parametrize("null_row", [True, False], ids=["null row", "no null row"])
@pytest.mark.parametrize("final_norm", [True, False], ids=["final norm", "no final norm"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_device_half_follows_the_formulas(count: int, null_row: bool, final_norm: bool) -> None:
    moa = random_moa(replace(ODD, ca_kv_heads=2, null_row=null_row, final_norm=final_norm))
    tokens, _ = random_sequence(moa.config, 6, 2, torch.float64)
    rows = torch.randn(count, 2, 2, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    empty = torch.zeros(0, 2, 10, dtype=torch.float64)
    causal = torch.full((6, 6), MASKED, dtype=torch.float64).triu(1)
    keys, values = moa.device_half.with_null_row(rows).unbind(1)
    every = torch.arange(6)
    got = moa.device_half(tokens, every, every, causal, empty, empty, keys, values)[0].detach().numpy()
    weights = arrays(moa.device_half)
    assert ("null_row" in weights) == null_row
    expected = [reference_logits(weights, moa.config, tokens[: n + 1].tolist(), list(rows.numpy())) for n in range(6)]
    np.testing.assert_allclose(got, np.stack(expected), atol=2e-5)


def test_server_half_has_no_state_between_tokens() -> None:
    moa = random_moa()
    _, kv = random_sequence(ODD, 5, 1, torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    together = moa.server(kv, torch.arange(5))
    torch.testing.assert_close(moa.server(kv[order], order), together[order], rtol=0, atol=1e-12)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=25)
def test_grouped_attention_equals_repeated_keys(batch: int, n: int, kv_heads: int, m: int, seed: int) -> None:
    torch.manual_seed(seed)
    attention = Attention(12, 2 * kv_heads, kv_heads, 4).double()
    q = torch.randn(batch, n, 2 * kv_heads, 4, dtype=torch.float64)
    k, v = (torch.randn(batch, m, kv_heads, 4, dtype=torch.float64) for _ in range(2))
    mask = torch.where(torch.rand(batch, n, m) < 0.4, MASKED, 0.0).double()
    mask[:, :, 0] = 0.0
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask[:, None], enable_gqa=True
    )
    expected = attention.o_proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention.attend(q, k, v, mask), expected, rtol=0, atol=1e-5)


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 6), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40)
def test_past_keys_apart_equal_past_keys_in_front(
    batch: int, n: int, kv_heads: int, groups: int, past: int, one_mask: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    attention = Attention(12, groups * kv_heads, kv_heads, 4).double()
    q = torch.randn(batch, n, groups * kv_heads, 4, dtype=torch.float64)
    past_k, past_v = (torch.randn(batch, past, kv_heads, 4, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(batch, n, kv_heads, 4, dtype=torch.float64) for _ in range(2))
    mask = torch.where(torch.rand(1 if one_mask else batch, n, past + n) < 0.4, MASKED, 0.0).double()
    mask[:, torch.arange(n), past + torch.arange(n)] = 0.0
    got = attention.attend_past(q, past_k, past_v, k, v, mask)
    keys, values = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
    # softmax is float32
    torch.testing.assert_close(got, attention.attend(q, keys, values, mask), rtol=0, atol=1e-6)
    direct = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, keys, values)), attn_mask=mask[:, None], enable_gqa=True
    )
    torch.testing.assert_close(got, attention.o_proj(direct.transpose(1, 2).flatten(2)), rtol=0, atol=1e-5)


def test_only_wanted_steps_get_logits() -> None:
    moa = random_moa()
    empty, row = torch.zeros(0, 2, 10, dtype=torch.float64), torch.ones(1, 1, 10, dtype=torch.float64)
    step = (torch.tensor([4, 5, 6]), torch.arange(3))
    mask = torch.full((3, 3), MASKED, dtype=torch.float64).triu(1)
    every = moa.device_half(*step, torch.arange(3), mask, empty, empty, row, row)[0]
    some, keys, _ = moa.device_half(*step, torch.tensor([2, 0]), mask, empty, empty, row, row)
    torch.testing.assert_close(some, every[[2, 0]], rtol=0, atol=1e-12)
    assert keys.shape == (3, 2, 10)


@torch.no_grad()
def first_logits(half: DeviceHalf, rows: Tensor) -> Tensor:
    """Logits behind a text of one token; rows [m, 2, 1, 10]."""
    zero, empty = torch.tensor([0]), torch.zeros(0, 2, 10, dtype=torch.float64)
    return half(torch.tensor([4]), zero, zero, torch.zeros(1, 1).double(), empty, empty, *rows.unbind(1))[0]


def test_null_row_alone_is_read() -> None:
    """Without any feature row the device drafts, and what it drafts depends on the null row's values only."""
    half = random_moa().device_half
    assert half.null_row is not None
    nothing = torch.zeros(0, 2, 1, 10, dtype=torch.float64)
    before = first_logits(half, half.with_null_row(nothing))
    assert before.isfinite().all()
    half.null_row.data[0] += 1.0  # a key alone always has weight 1
    torch.testing.assert_close(first_logits(half, half.with_null_row(nothing)), before, rtol=0, atol=1e-12)
    half.null_row.data[1] += 1.0
    assert (first_logits(half, half.with_null_row(nothing)) - before).abs().max() > 1e-3


def random_rows(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 2, 1, 10, generator=torch.Generator().manual_seed(3), dtype=dtype)


def test_null_row_comes_before_the_rows_in_their_precision() -> None:
    half, rows = random_moa().device_half, random_rows(3, torch.float32)
    got = half.with_null_row(rows)
    assert half.null_row is not None and got.dtype == torch.float32
    assert torch.equal(got[0], half.null_row.float()) and torch.equal(got[1:], rows)


def test_null_row_may_stand_anywhere_among_the_rows() -> None:
    half = random_moa().device_half
    rows = half.with_null_row(random_rows(3))
    before = first_logits(half, rows)
    torch.testing.assert_close(first_logits(half, rows[[2, 1, 0, 3]]), before, rtol=0, atol=1e-6)
    assert (first_logits(half, rows[1:]) - before).abs().max() > 1e-3


def test_without_a_null_row_only_the_rows_themselves_are_read() -> None:
    half, rows = random_moa(replace(ODD, null_row=False)).device_half, random_rows(3)
    assert half.null_row is None and "null_row" not in dict(half.named_parameters())
    assert torch.equal(half.with_null_row(rows), rows)


def test_without_any_row_a_row_of_zeros_is_read() -> None:
    """Its value adds nothing and its key does not matter, so it drafts from its own text."""
    half = random_moa(replace(ODD, null_row=False)).device_half
    rows = half.with_null_row(random_rows(0, torch.float32))
    assert rows.shape == (1, 2, 1, 10) and rows.dtype == torch.float32 and not rows.any()
    alone = first_logits(half, rows.double())
    other_key = torch.cat([random_rows(1)[:, :1], rows[:, 1:].double()], 1)
    torch.testing.assert_close(first_logits(half, other_key), alone, rtol=0, atol=1e-12)
    half.cross_attention.self_attn.o_proj.weight.data.zero_()
    torch.testing.assert_close(first_logits(half, random_rows(2)), alone, rtol=0, atol=1e-12)


# configuration


def shape_config(depth: int, **changes: Any) -> SimpleNamespace:
    values = {
        "num_hidden_layers": depth, "num_key_value_heads": 2, "num_attention_heads": 4, "hidden_size": 32,
        "head_dim": 8, "vocab_size": 100, "intermediate_size": 48, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "rope_parameters": {"rope_theta": 5000.0},
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


@given(st.integers(2, 80), st.integers(2, 12))
def test_default_layers_are_spread_from_first_to_last(depth: int, layers: int) -> None:
    chosen = MoAConfig.for_target(shape_config(depth), "h", layers=layers).target_layers
    assert (chosen[0], chosen[-1], len(chosen)) == (0, depth - 1, min(layers, depth))
    steps = [b - a for a, b in pairwise(chosen)]
    assert min(steps) >= 1 and max(steps) - min(steps) <= 1


def test_a_single_layer_is_the_last() -> None:
    assert MoAConfig.for_target(shape_config(9), "h", layers=1).target_layers == (8,)


def test_defaults_are_limited_by_the_target() -> None:
    config = MoAConfig.for_target(shape_config(3), "h", draft_vocab=500, max_context=4096)
    assert (config.draft_vocab_size, config.max_context, config.rope_theta) == (100, 512, 5000.0)
    assert config.null_row
    config.check()


def test_head_dim_is_derived_where_the_target_names_none() -> None:
    assert MoAConfig.for_target(shape_config(3, head_dim=None), "h").head_dim == 8


@pytest.mark.parametrize("target_heads", [(3, 6), (1, 18), (9, 2)])
def test_widths_do_not_depend_on_the_targets_heads(target_heads: tuple[int, int]) -> None:
    """The same kv_width cut into other heads of the target: the same drafter, the same rows."""
    moa = random_moa()
    other = random_moa(replace(ODD, target_kv_heads=target_heads[0], target_head_dim=target_heads[1]))
    _, kv = random_sequence(ODD, 3, 1, torch.float64)
    torch.testing.assert_close(other.server(kv, torch.arange(3)), moa.server(kv, torch.arange(3)), rtol=0, atol=0)


def test_row_shape_is_the_drafters_own() -> None:
    config = replace(ODD, ca_kv_heads=4, head_dim=14)
    _, kv = random_sequence(config, 3, 1, torch.float64)
    assert random_moa(config).server(kv, torch.arange(3)).shape == (3, 2, 4, 14)


@pytest.mark.parametrize(
    "change",
    [
        {"lsa_heads": 5},
        {"lsa_heads": 12},  # head width 3, odd
        {"lsa_kv_heads": 4},
        {"lsa_kv_heads": 0},
        {"sa_kv_heads": 3},
        {"ca_kv_heads": 3},
        {"ca_kv_heads": 0},
        {"head_dim": 9},
    ],
    ids=str,
)
def test_widths_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(DrafterError, match=next(iter(change))):
        MoA(replace(ODD, **change))


def test_fitting_widths_pass_the_check() -> None:
    ODD.check()
