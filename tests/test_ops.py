"""PyTorch operators as far as they go without a card: what they refuse, and what the compiler is told of them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fut_runtime.cuda.gemm import padded_empty
from fut_runtime.errors import FutError
from fut_runtime.ops import mm_bf16, mm_fp8, prefill_attention

E4M3 = torch.float8_e4m3fn


def zeros(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(*shape).to(dtype)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            zeros(3, 32, dtype=torch.bfloat16),
            zeros(4, 32),
            r"a is torch.bfloat16 \[3, 32\], expected a matrix of .*e4m3",
        ),
        (zeros(3, 32), zeros(32), r"b is torch.float8_e4m3fn \[32\], expected a matrix"),
        (zeros(3, 32), zeros(4, 48), r"a \[3, 32\] and b \[4, 48\] have rows of different lengths"),
        (zeros(3, 32), zeros(4, 32), r"out is .* on cpu, expected row-major torch.bfloat16 \[3, 4\] on a card"),
    ],
)
def test_operands_of_other_types_and_shapes_are_refused(a: torch.Tensor, b: torch.Tensor, message: str) -> None:
    with pytest.raises(FutError, match=message):
        mm_fp8(a, b)


def test_scales_and_outputs_of_other_kinds_are_refused() -> None:
    with pytest.raises(FutError, match="a_scale has 3 elements, expected 1; row_scale takes one for each row"):
        mm_fp8(zeros(3, 32), zeros(4, 32), a_scale=torch.ones(3))
    with pytest.raises(FutError, match=r"out is torch.float16, expected torch\.bfloat16 or"):
        mm_bf16(zeros(3, 32, dtype=torch.bfloat16), zeros(4, 32, dtype=torch.bfloat16), out_dtype=torch.float16)


def test_the_compiler_knows_shapes_types_and_strides() -> None:
    with FakeTensorMode():
        a, b = torch.empty(5, 64, dtype=E4M3), torch.empty(7, 64, dtype=E4M3)
        for dtype, stride in ((torch.bfloat16, 8), (torch.float32, 8)):
            out = torch.ops.fut.mm_fp8(a, b, out_dtype=dtype)
            assert (tuple(out.shape), out.dtype, out.stride()) == ((5, 7), dtype, (stride, 1))
        wide = torch.ops.fut.mm_bf16(a.to(torch.bfloat16), b.to(torch.bfloat16))
        assert tuple(wide.shape) == (5, 7)


@pytest.mark.parametrize(
    ("dtype", "columns", "stride"), [(E4M3, 127, 128), (torch.bfloat16, 9, 16), (torch.float32, 4, 4)]
)
def test_padded_rows_are_multiples_of_16_bytes_apart(dtype: torch.dtype, columns: int, stride: int) -> None:
    matrix = padded_empty(3, columns, dtype, "cpu")
    assert tuple(matrix.shape) == (3, columns) and matrix.stride() == (stride, 1)


def attention_inputs(dtype: torch.dtype = torch.bfloat16, heads: int = 6, head_dim: int = 80) -> list[torch.Tensor]:
    pages = torch.zeros(3, 2, 64, 80, dtype=torch.bfloat16)
    numbers = [torch.zeros(size, dtype=torch.int32) for size in (3, 2, 2)]
    table = torch.zeros(2, 4, dtype=torch.int32)
    return [torch.zeros(9, heads, head_dim, dtype=dtype), pages, pages, table, *numbers]


def test_attention_of_other_types_and_shapes_is_refused() -> None:
    for inputs, message in (
        (attention_inputs(torch.float16), r"q is torch.float16 \[9, 6, 80\], expected torch.bfloat16"),
        (attention_inputs(head_dim=72), r"\[9, 6, 72\], expected .* a head_dim of 64, 80, 96, 128"),
        (
            attention_inputs(head_dim=64),
            r"keys are torch.bfloat16 \[3, 2, 64, 80\], expected .*\[pages, kv_heads, 64, 64\]",
        ),
        (attention_inputs(heads=5), "with a divisor of 5 KV heads"),
        (attention_inputs(), r"q is .* on cpu, expected contiguous torch.bfloat16 \[9, 6, 80\] on a card"),
    ):
        with pytest.raises(FutError, match=message):
            prefill_attention(*inputs)


def test_the_compiler_knows_attentions_shape() -> None:
    with FakeTensorMode():
        q, *others = (torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in attention_inputs())
        out = prefill_attention(q, *others)
        assert (out.shape, out.dtype, out.stride()) == (q.shape, q.dtype, q.stride())
