"""Prompts' attention on the card against FP64, in memory that is NaN wherever it must not look."""

from __future__ import annotations

import pytest
import torch

import attention_checks
from attention_checks import BF16, Setting
from fut_runtime.cuda import prefill_attention
from fut_runtime.cuda.library import CudaCallError
from gemm_matrices import device, poisoned

pytestmark = pytest.mark.usefixtures("built")

HEADS = [(2, 2), (3, 1), (16, 2)]
HEAD_DIMS = [64, 80, 96, 128]
LENGTHS = [1, 7, 63, 64, 65, 127, 129, 300]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_awkward_lengths_alone_and_side_by_side(heads: int, kv_heads: int, head_dim: int) -> None:
    attention_checks.check_attention([(0, length) for length in LENGTHS], heads, kv_heads, head_dim)
    for length in LENGTHS:
        attention_checks.check_attention([(0, length)], heads, kv_heads, head_dim)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_chunks_that_continue_at_any_position(heads: int, kv_heads: int, head_dim: int) -> None:
    chunks = [(1, 1), (63, 2), (64, 64), (128, 1), (127, 40), (300, 17), (5, 0), (191, 65), (2047, 130), (4000, 1)]
    attention_checks.check_attention(chunks, heads, kv_heads, head_dim)


def test_more_requests_than_a_warp_has_lanes() -> None:
    attention_checks.check_attention([(7 * i % 300, i % 9) for i in range(200)], 4, 2, 64)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_row_does_not_depend_on_its_company_or_its_chunk(head_dim: int) -> None:
    attention_checks.check_company(8, 2, head_dim, 1500, [1, 100, 128, 700, 1499])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_output_in_e4m3(head_dim: int) -> None:
    attention_checks.check_quantized([(0, 700), (300, 90), (0, 1)], 6, 2, head_dim)


def test_what_a_row_must_not_see_may_be_infinite() -> None:
    attention_checks.check_infinite_values()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_and_short_requests_together(head_dim: int) -> None:
    """More tiles than the card has multiprocessors, of very different lengths."""
    chunks = [(0, 8192), (0, 1), (5000, 2048), (8190, 3), (0, 128), (100, 128)]
    attention_checks.check_some_rows(chunks, 16, 4, head_dim, 100)


def test_the_longest_request() -> None:
    attention_checks.check_some_rows([(0, 131072)], 8, 1, 128, 64)


def test_in_a_graph_and_again() -> None:
    setting = Setting.random([(0, 900), (70, 60)], 8, 2, 128)
    first = setting.run()
    out, workspace = poisoned(960, setting.columns, BF16), prefill_attention.workspace(device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention.attend(setting.q, setting.history, setting.prompts, out, None, workspace)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first)


def test_what_cannot_be_is_refused() -> None:
    setting = Setting.random([(0, 10)], 2, 1, 64)
    out = torch.zeros(10, 132, dtype=BF16, device=device())[:, :128]
    small = torch.zeros(16, dtype=torch.uint8, device=device())
    workspace = prefill_attention.workspace(device())
    with pytest.raises(
        CudaCallError, match=r"the output \[10, 128\]: its stride between rows is 264, expected a multiple"
    ):
        prefill_attention.attend(setting.q, setting.history, setting.prompts, out, None, workspace)
    with pytest.raises(CudaCallError, match="the workspace has 16 bytes, needs 256"):
        prefill_attention.attend(setting.q, setting.history, setting.prompts, poisoned(10, 128, BF16), None, small)
    odd = Setting.random([(0, 10)], 2, 1, 32)
    with pytest.raises(CudaCallError, match="head_dim is 32, expected 64, 80, 96 or 128"):
        prefill_attention.attend(odd.q, odd.history, odd.prompts, poisoned(10, 64, BF16), None, workspace)
