"""PyTorch operators on the card: alone, in a CUDA graph, and compiled."""

from __future__ import annotations

import pytest
import torch

from attention_checks import Setting
from fut_runtime.ops import mm_bf16, mm_fp8, prefill_attention
from gemm_matrices import Product, relative, vector

pytestmark = pytest.mark.usefixtures("built")


def test_products_alone_and_in_a_graph() -> None:
    product = Product.random(129, 127, 576, torch.float8_e4m3fn)
    scales = (vector(1, 1), vector(129, 2), vector(127, 3), vector(127, 4))
    factors = (scales[0] * scales[1]).double()[:, None] * scales[2].double()
    expected = product.sum * factors + scales[3].double()
    found = mm_fp8(product.a, product.b, *scales, out_dtype=torch.float32, promoted=True)
    assert relative(found, expected) <= 2e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mm_fp8(product.a, product.b, *scales, out_dtype=torch.float32, promoted=True)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, found)


def test_products_in_a_compiled_function() -> None:
    product = Product.random(65, 256, 960, torch.bfloat16)

    @torch.compile
    def twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 2 * mm_bf16(a, b, out_dtype=torch.float32)

    assert relative(twice(product.a, product.b), 2 * product.sum) <= 1e-5


def test_attention_alone_in_a_graph_and_compiled() -> None:
    setting = Setting.random([(0, 200), (64, 30)], 8, 2, 128)
    history, prompts = setting.history, setting.prompts
    others = (history.keys, history.values, history.page_table)
    others += (prompts.first_row, prompts.first_position, prompts.slot)
    expected = setting.run().unflatten(1, (8, 128))
    assert torch.equal(prefill_attention(setting.q, *others), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = prefill_attention(setting.q, *others, max_chunk=200)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)

    @torch.compile
    def twice(q: torch.Tensor) -> torch.Tensor:
        return 2 * prefill_attention(q, *others)

    assert torch.equal(twice(setting.q), 2 * expected)
