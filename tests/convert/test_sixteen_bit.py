"""Both ways of multiplying BF16 numbers give the same numbers but for the order of their sums."""

from __future__ import annotations

import pytest
import torch

from fut_convert import sixteen_bit
from fut_convert.sixteen_bit import SixteenBitProjection, causal_attention, multiplies_bfloat16


@pytest.fixture(params=[True, False], ids=["bf16", "fp32"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bit, "multiplies_bfloat16", lambda _: request.param)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_product_is_exact_up_to_its_last_rounding(way: None) -> None:
    x, weight = normal(70, 200, seed=0), normal(96, 200, seed=1).bfloat16()
    found = SixteenBitProjection(weight).accumulate(x)
    exact = x.bfloat16().double() @ weight.double().T
    assert found.dtype == torch.float32 and torch.equal(found, found.bfloat16().float())
    # Half a unit in the last of eight bits, and FP32's sums beside it.
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


@pytest.mark.parametrize("group", [1, 3])
def test_attention_is_causal_and_stays_in_its_window(way: None, group: int) -> None:
    windows, tokens, heads, dim = 3, 37, 2, 16
    q = normal(windows * tokens, heads * group, dim, seed=2)
    k, v = (normal(windows * tokens, heads, dim, seed=s) for s in (3, 4))
    found = causal_attention(q, k, v, windows)
    wide = [x.bfloat16().double().unflatten(0, (windows, tokens)) for x in (q, k, v)]
    wide[1:] = [x.repeat_interleave(group, dim=2) for x in wide[1:]]
    scores = torch.einsum("wqhd,wkhd->whqk", wide[0], wide[1]) * dim**-0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    exact = torch.einsum("whqk,wkhd->wqhd", scores.softmax(-1), wide[2]).flatten(0, 1)
    assert found.dtype == torch.float32 and found.shape == q.shape
    assert (found - exact).norm() < 0.005 * exact.norm()


def test_a_gpu_always_multiplies_bfloat16_and_a_cpu_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiplies_bfloat16(torch.device("cuda"))
    for capabilities, expected in (({"amx_bf16": True}, True), ({"avx512_bf16": True}, False), ({}, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False)
        assert multiplies_bfloat16(torch.device("cpu")) is expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not multiplies_bfloat16(torch.device("cpu"))
