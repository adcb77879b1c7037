"""Decode's matrix products on the card against FP64, on awkward sizes; and the same bits alone and in company."""

from __future__ import annotations

import pytest
import torch

from fut_runtime.cuda.operations import project
from fut_runtime.cuda.structs import Epilogue
from projection_matrices import BF16_TOLERANCE, FORMATS, STORE_TOLERANCE, activations, matrix, normalized, relative

pytestmark = pytest.mark.usefixtures("built")

DEVICE = "cuda"
#: Rows and columns: whole slices, fewer units of K than slices, padded rows, columns that fill no unit, large K.
SIZES = [(960, 576), (48, 64), (100, 960), (640, 1568), (1024, 14336), (256, 28672)]


@pytest.mark.parametrize(("rows", "cols"), SIZES)
@pytest.mark.parametrize(("weight_format", "group"), FORMATS)
def test_products_with_bias_and_norm(weight_format: str, group: int, rows: int, cols: int) -> None:
    for tokens in (1, 2, 7, 8, 9, 16, 17, 32, 45, 64):
        bias = torch.randn(rows, device=DEVICE)
        gain = torch.rand(cols, device=DEVICE) * 2
        stored, values = matrix(weight_format, group, rows, cols, seed=tokens, device=DEVICE, bias=bias, gain=gain)
        x = activations(tokens, cols, seed=tokens, device=DEVICE)
        plain = project(stored, x)
        assert relative(plain, x.double() @ values.T + bias.double()) <= STORE_TOLERANCE, tokens
        normed = project(stored, x, eps=1e-5)
        expected = normalized(x, gain, 1e-5).double() @ values.T + bias.double()
        assert relative(normed, expected) <= STORE_TOLERANCE, tokens
        for token in {0, tokens // 2, tokens - 1}:
            alone = x[token : token + 1].contiguous()
            assert torch.equal(project(stored, alone)[0], plain[token]), f"token {token} of {tokens}"
            assert torch.equal(project(stored, alone, eps=1e-5)[0], normed[token]), f"token {token} of {tokens}"


@pytest.mark.parametrize(("weight_format", "group"), FORMATS)
def test_swiglu_and_residual(weight_format: str, group: int) -> None:
    for tokens in (1, 5, 12, 32, 40):
        for channels, cols in ((1568, 576), (1536, 960), (4100, 512)):
            gain = torch.rand(cols, device=DEVICE) + 0.5
            stored, values = matrix(
                weight_format, group, 2 * channels, cols, seed=tokens, device=DEVICE, paired=True, gain=gain
            )
            x = activations(tokens, cols, seed=tokens, device=DEVICE)
            both = normalized(x, gain, 1e-6).double() @ values.T
            expected = torch.nn.functional.silu(both[:, :channels]) * both[:, channels:]
            assert relative(project(stored, x, Epilogue.SWIGLU, eps=1e-6), expected) <= BF16_TOLERANCE
        for rows, cols in ((576, 1536), (4096, 1568), (100, 640)):
            stored, values = matrix(weight_format, group, rows, cols, seed=tokens, device=DEVICE)
            x = activations(tokens, cols, seed=tokens, device=DEVICE)
            h = torch.randn(tokens, rows, device=DEVICE).to(torch.bfloat16)
            expected = h.double() + x.double() @ values.T
            assert relative(project(stored, x, Epilogue.RESIDUAL, y=h), expected) <= BF16_TOLERANCE


def test_extreme_activations_neither_overflow_nor_vanish() -> None:
    """FP16 operands hold BF16's range, since each slice of a token comes with a power of two."""
    stored, values = matrix("int4", 64, 64, 1024, seed=2, device=DEVICE)
    for size in (1e-35, 1e-10, 1e10, 1e34):
        x = (activations(3, 1024, seed=1, device=DEVICE).float().clamp(-1, 1) * size).to(torch.bfloat16)
        assert relative(project(stored, x), x.double() @ values.T) <= STORE_TOLERANCE, size
    zero = torch.zeros(2, 1024, dtype=torch.bfloat16, device=DEVICE)
    assert not project(stored, zero).any()


def test_repeated_launches_give_the_same_bits() -> None:
    stored, _ = matrix("int4", 128, 1536, 4096, seed=4, device=DEVICE)
    x = activations(19, 4096, seed=4, device=DEVICE)
    first = project(stored, x)
    assert all(torch.equal(project(stored, x), first) for _ in range(50))
