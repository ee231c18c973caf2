"""Packed linears give the same numbers as the layers they replace."""

from __future__ import annotations

import pytest
import torch

from outrider_core.models.packing import PackedLinear, pack_linears
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("rows", [1, 2, 9, 33, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_equals_plain(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear, x = torch.nn.Linear(48, 80, bias=bias), torch.randn(1, rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_model_gives_the_same_logits(family: str) -> None:
    model = tiny_model(family, dtype=torch.float32, tied=True)
    ids = torch.arange(4, 40)[None]
    with torch.inference_mode():
        before = model(ids).logits
        assert pack_linears(model) == 2 * 7 + 1
        torch.testing.assert_close(model(ids).logits, before, atol=2e-4, rtol=1e-4)


def test_other_number_formats_stay_as_they_are() -> None:
    assert pack_linears(tiny_model(dtype=torch.float64)) == 0
    assert pack_linears(tiny_model(dtype=torch.float16)) == 0


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 in oneDNN")
@pytest.mark.parametrize("rows", [1, 33])
def test_packed_bfloat16_is_as_good_as_plain(rows: int) -> None:
    torch.manual_seed(rows)
    linear, x = torch.nn.Linear(64, 80, dtype=torch.bfloat16), torch.randn(1, rows, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        exact = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        plain, packed = (linear(x) - exact).abs().mean(), (PackedLinear(linear)(x) - exact).abs().mean()
    assert packed <= 1.1 * plain < 0.01
