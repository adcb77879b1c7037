"""E4M3 weights times 16-bit activations on the card: every tile and split, and as accurate as casting the weights."""

from __future__ import annotations

import pytest
import torch

from fut_runtime.cuda.library import CudaCallError
from fut_runtime.errors import FutError
from fut_runtime.ops import mm_bf16_fp8, mm_bf16_fp8_workspace_bytes, mm_fp16_fp8
from gemm_matrices import E4M3, operand, vector
from w8a16_checks import TILES, check_product

pytestmark = pytest.mark.usefixtures("built")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize(("channels", "tokens"), TILES)
def test_awkward_sizes_in_every_tile(dtype: torch.dtype, channels: int, tokens: int, splits: int) -> None:
    for m, n, k in ((1, 7, 1568), (7, 576, 1568), (127, 129, 1537), (tokens, 20000, 1600), (1000, 1568, 2048)):
        check_product(m, n, k, dtype, channels, tokens, splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_less_accurate_than_casting_the_weights(dtype: torch.dtype) -> None:
    product = mm_bf16_fp8 if dtype == torch.bfloat16 else mm_fp16_fp8
    for m in (1, 16, 64, 2048):
        a, b = operand(m, 4096, dtype, 1), operand(1024, 4096, E4M3, 2)
        alpha, bias = vector(1024, 3) * 0.01, vector(1024, 4)
        expected = (a.double() @ b.double().T) * alpha.double() + bias.double()
        cast = torch.nn.functional.linear(a, b.to(dtype)).float() * alpha + bias
        ours = product(a, b, alpha, bias)
        assert (ours.double() - expected).norm() <= (cast.to(dtype).double() - expected).norm() * 1.01, m


@pytest.mark.parametrize("tactic", [6404, 106404])
def test_a_row_is_the_same_with_one_workspace_in_a_graph_and_again(tactic: int) -> None:
    a, b, alpha = operand(40, 4096, torch.bfloat16, 1), operand(512, 4096, E4M3, 2), vector(1, 3)
    workspace = torch.zeros(mm_bf16_fp8_workspace_bytes(40, 512, 4096, tactic), dtype=torch.uint8, device="cuda")
    first = mm_bf16_fp8(a, b, alpha, tactic=tactic, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mm_bf16_fp8(a, b, alpha, tactic=tactic, workspace=workspace)
    for _ in range(20):
        graph.replay()
    assert torch.equal(captured, first)
    assert torch.equal(mm_bf16_fp8(a[7:8], b, alpha, tactic=tactic), first[7:8])


def test_what_cannot_be_is_refused() -> None:
    a, b, alpha = operand(3, 64, torch.bfloat16, 1), operand(8, 64, E4M3, 2), vector(1, 3)
    with pytest.raises(FutError, match="tactic 1700 is none"):
        mm_bf16_fp8(a, b, alpha, tactic=1700)
    with pytest.raises(FutError, match="tactic 112801 is none"):
        mm_bf16_fp8(a, b, alpha, tactic=112801)
    with pytest.raises(FutError, match=r"expected torch\.float16 \[m, k\]"):
        mm_fp16_fp8(a, b, alpha)
    with pytest.raises(CudaCallError, match="k of 64 cannot be split 2 times"):
        mm_bf16_fp8(a, b, alpha, tactic=1602)
    long_a, long_b = operand(3, 640, torch.bfloat16, 1), operand(8, 640, E4M3, 2)
    with pytest.raises(CudaCallError, match="the workspace has 16 bytes, needs"):
        mm_bf16_fp8(long_a, long_b, alpha, tactic=1602, workspace=torch.zeros(16, dtype=torch.uint8, device="cuda"))
