"""Prefill's products on the card against FP64 on awkward sizes, in memory that is NaN wherever they must not look."""

from __future__ import annotations

import pytest
import torch

from fut_runtime.cuda import gemm
from fut_runtime.cuda.gemm import SQUARE_COLUMNS, History, Quantized, Scales, Tuning
from fut_runtime.cuda.library import CudaCallError
from fut_runtime.cuda.structs import PAGE_TOKENS, Accumulation
from fut_runtime.reference.layer import head_norm
from fut_runtime.reference.numerics import to_e4m3
from fut_runtime.reference.rope import apply_rope
from gemm_matrices import DEVICE, E4M3, Product, close, operand, poisoned, relative, untouched, vector

pytestmark = pytest.mark.usefixtures("built")

BF16 = torch.bfloat16
SIZES = [1, 7, 127, 129, 576, 1568]
TILES = [(256, 1), (256, 2), (128, 1), (128, 2)]
#: Of BF16 outputs: a unit in the last place.
BF16_TOLERANCE = 2**-8


def tolerance(dtype: torch.dtype, accumulation: Accumulation) -> float:
    """Of a sum, in units of the sum of its terms' magnitudes.

    The tensor cores cut partial sums of E4M3 products off, once every 32 of k: thousands of terms beside an outlier
    lose percents.
    """
    if dtype == BF16:
        return 1e-5
    return 2e-2 if accumulation == Accumulation.FAST else 5e-3


def tuning(accumulation: Accumulation, tile: tuple[int, int] = (0, 0)) -> Tuning:
    return Tuning(accumulation, *tile)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("tile", TILES)
def test_awkward_sizes_in_every_tile(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    """Each size of m with each of n, k going round; and nothing outside of the output is written."""
    for i, m in enumerate(SIZES):
        for j, n in enumerate(SIZES):
            k = SIZES[(i + 2 * j) % len(SIZES)]
            product = Product.random(m, n, k, dtype)
            expected = product.sum
            for accumulation in Accumulation:
                allowed = product.magnitude * tolerance(dtype, accumulation)
                for out in (poisoned(m, n, torch.float32), poisoned(m, n, BF16)):
                    gemm.store(product.a, product.b, out, tuning=tuning(accumulation, tile))
                    rounding = expected.abs() * (BF16_TOLERANCE if out.dtype == BF16 else 0)
                    assert close(out, expected, allowed + rounding), (m, n, k, accumulation)
                    assert untouched(out), (m, n, k)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_scales_and_bias(dtype: torch.dtype) -> None:
    m, n, k, requests = 300, 1000, 960, 3
    product = Product.random(m, n, k, dtype)
    row, channel, bias, scale = vector(m, 1), vector(n, 2), vector(n, 3) * 100, vector(requests, 4)
    request = torch.arange(m, device=DEVICE, dtype=torch.int32) // 130
    sums = vector(m * 5, 5).view(m, 5) * 1000
    rho = (sums.double().sum(1) / k + 1e-5).rsqrt()
    factors = (row * scale[request.long()]).double()[:, None] * rho[:, None] * channel.double()
    scales = Scales(row, sums, 1e-5, scale, request, channel, bias)
    allowed = tolerance(dtype, Accumulation.PROMOTED)
    for given, factor in ((scales, factors), (Scales(bias=bias), torch.ones_like(factors))):
        out = poisoned(m, n, torch.float32)
        gemm.store(product.a, product.b, out, given, tuning(Accumulation.PROMOTED))
        assert close(out, product.sum * factor + bias.double(), product.magnitude * factor * allowed + 1e-4)


def test_promoted_sums_are_more_accurate() -> None:
    product = Product.random(256, 256, 14336, E4M3)
    errors = []
    for accumulation in Accumulation:
        out = poisoned(256, 256, torch.float32)
        gemm.store(product.a, product.b, out, tuning=tuning(accumulation))
        errors.append(float((out.double() - product.sum).norm() / product.sum.norm()))
    print(f"relative error of sums over 14336: fast {errors[0]:.2e}, promoted {errors[1]:.2e}")
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_a_row_does_not_depend_on_its_company(accumulation: Accumulation) -> None:
    """Bit for bit: in every tile, alone, and again."""
    product = Product.random(700, 640, 1568, E4M3)
    outs = []
    for tile in [*TILES, (0, 0)]:
        for rows in (700, 700, 129, 1):
            out = poisoned(rows, 640, torch.float32)
            gemm.store(product.a[:rows], product.b, out, tuning=tuning(accumulation, tile))
            outs.append(out)
    assert all(torch.equal(out, outs[0][: len(out)]) for out in outs)


def test_large_products_in_every_order_of_tiles() -> None:
    """More tiles than the card has multiprocessors, and rows of tiles that fill no group."""
    for m, n, k in ((2048, 6144, 4096), (4500, 2500, 512), (16, 20000, 512), (20000, 100, 256)):
        product = Product.random(m, n, k, E4M3)
        out = poisoned(m, n, BF16)
        gemm.store(product.a, product.b, out)
        allowed = product.magnitude * tolerance(E4M3, Accumulation.FAST) + product.sum.abs() * BF16_TOLERANCE
        assert close(out, product.sum, allowed), (m, n, k)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("tile", TILES)
def test_residual(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    for m, n, k in ((1, 576, 1536), (129, 576, 127), (200, 1000, 640), (130, 129, 1568), (7, 7, 7)):
        product = Product.random(m, n, k, dtype)
        before = operand(m, n, BF16, 5)
        channel, requests = vector(n, 1) * 0.1, torch.arange(m, device=DEVICE, dtype=torch.int32) // 70
        scale = vector(3, 2) * 0.02
        for accumulation in Accumulation if tile[0] == 128 else [Accumulation.FAST]:
            h = poisoned(m, n, BF16)
            h.copy_(before)
            amax, saturated = torch.zeros(3, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
            copy = Quantized(poisoned(m, n, E4M3), scale, amax, saturated)
            sums = torch.full((m, -(-n // SQUARE_COLUMNS)), torch.nan, device=DEVICE)
            scales = Scales(channel=channel, row_request=requests)
            gemm.add_residual(product.a, product.b, h, copy, sums, scales, tuning(accumulation, tile))
            expected = before.double() + product.sum * channel.double()
            allowed = product.magnitude * channel.double() * tolerance(dtype, accumulation)
            assert close(h, expected, allowed + expected.abs() * BF16_TOLERANCE) and untouched(h), (m, n, k)
            check_quantized(copy, h.float(), requests)
            assert relative(sums.sum(1, keepdim=True), h.double().square().sum(1, keepdim=True)) <= 1e-5
            again = poisoned(m, n, BF16)
            again.copy_(before)
            gemm.add_residual(product.a, product.b, again, scales=scales, tuning=tuning(accumulation, tile))
            assert torch.equal(again, h)


def check_quantized(found: Quantized, x: torch.Tensor, requests: torch.Tensor) -> None:
    """Values, maxima and counts of an E4M3 copy of x, bit for bit."""
    saturated = 0
    for i, scale in enumerate(found.scale):
        rows = requests == i
        if not rows.any():
            continue
        values, count = to_e4m3(x[rows], scale)
        saturated += int(count)
        assert torch.equal(found.data[rows].float(), values), f"request {i}"
        assert found.amax is not None and found.amax[i] == x[rows].abs().max()
    assert found.saturated is not None and int(found.saturated) == saturated
    assert untouched(found.data)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("tile", TILES)
def test_swiglu(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    for m, channels, k in ((1, 1536, 576), (129, 1568, 127), (200, 72, 960), (300, 1, 64), (64, 127, 256)):
        product = Product.random(m, 2 * channels, k, dtype)
        factor = vector(m, 1) * 0.02
        scale = torch.tensor([0.004], device=DEVICE)
        amax, saturated = torch.zeros(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        out = Quantized(poisoned(m, channels, E4M3), scale, amax, saturated)
        gemm.swiglu(product.a, product.b, out, Scales(row_factor=factor), tuning(Accumulation.PROMOTED, tile))
        both = product.sum * factor.double()[:, None]
        error = product.magnitude * factor.double()[:, None] * tolerance(dtype, Accumulation.PROMOTED)
        gate, up = both[:, ::2], both[:, 1::2]
        expected = torch.nn.functional.silu(gate) * up
        most = 448 * scale.item()
        # Half a unit in the last of E4M3's places, below 2^-6 of a fixed size, and what the sums lack.
        allowed = expected.abs() * 2**-4 + scale.item() * 2**-10
        allowed += 1.1 * up.abs() * error[:, ::2] + torch.nn.functional.silu(gate).abs() * error[:, 1::2]
        assert close(out.data.double() * scale, expected.clamp(-most, most), allowed), (m, channels, k)
        assert untouched(out.data)
        assert abs(float(amax) - float(expected.abs().max())) <= 2e-2 * float(expected.abs().max()), (m, channels, k)
        beyond = int((expected.abs() > most).sum())
        assert abs(int(saturated) - beyond) <= 2 + 0.05 * beyond


def test_a_maximum_that_is_not_finite_is_recorded() -> None:
    product = Product.random(130, 256, 128, BF16)
    product.a[129, 5] = torch.inf
    amax = torch.zeros(1, device=DEVICE)
    gemm.swiglu(product.a, product.b, Quantized(poisoned(130, 128, E4M3), torch.ones(1, device=DEVICE), amax))
    assert not bool(amax.isfinite().any())


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_qkv(head_dim: int, dtype: torch.dtype) -> None:
    for heads, kv_heads, tile in ((6, 2, (256, 2)), (5, 5, (128, 1)), (7, 1, (0, 0))):
        for tokens, first in (([1], [0]), ([90, 200], [30, 0]), ([3, 70, 64], [500, 63, 64])):
            check_qkv(head_dim, dtype, heads, kv_heads, tile, tokens, first)


def check_qkv(
    head_dim: int,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    tile: tuple[int, int],
    tokens: list[int],
    first: list[int],
) -> None:
    """Requests of so many tokens, each from its first position on, side by side."""
    m, n, k = sum(tokens), (heads + 2 * kv_heads) * head_dim, 576
    product = Product.random(m, n, k, dtype)
    positions = torch.cat([torch.arange(n) + begin for n, begin in zip(tokens, first, strict=True)])
    slots = torch.cat([torch.full((n,), len(tokens) - 1 - i) for i, n in enumerate(tokens)])
    width = 640 // PAGE_TOKENS
    table = torch.randperm(len(tokens) * width, generator=torch.Generator().manual_seed(1)).view(len(tokens), width)
    history = History.empty(table.to(DEVICE, torch.int32), table.numel(), kv_heads, head_dim)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    every = torch.arange(640)[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    rope = (every.cos().to(DEVICE), every.sin().to(DEVICE))
    norms = (vector(head_dim, 1), vector(head_dim, 2)) if heads % 2 else None
    channel, bias = vector(n, 3) * 0.05, vector(n, 4)
    found = gemm.qkv(
        product.a, product.b, history, positions.to(DEVICE, torch.int32), slots.to(DEVICE, torch.int32), rope,
        norms=norms, scales=Scales(channel=channel, bias=bias), tuning=tuning(Accumulation.PROMOTED, tile),
    )  # fmt: skip
    both = (product.sum * channel.double() + bias.double()).view(m, -1, head_dim)
    q, k_heads, v = both.split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k_heads = head_norm(q, norms[0], 1e-6), head_norm(k_heads, norms[1], 1e-6)
    turns = (angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    q, k_heads = apply_rope(q, *turns), apply_rope(k_heads, *turns)
    page, place = table[slots, positions // PAGE_TOKENS].to(DEVICE), (positions % PAGE_TOKENS).to(DEVICE)
    allowed = BF16_TOLERANCE if dtype == BF16 else 2e-2
    assert relative(found, q) <= allowed
    assert relative(history.keys[page, :, place], k_heads) <= allowed
    assert relative(history.values[page, :, place], v) <= allowed
    for written in (history.keys, history.values):
        written[page, :, place] = torch.nan
        assert bool(written.isnan().all())


def test_what_the_copy_engine_cannot_read_is_refused() -> None:
    a, b = operand(4, 64, E4M3, 1), operand(8, 64, E4M3, 2)
    out = poisoned(4, 8, BF16)
    with pytest.raises(CudaCallError, match=r"A \[4, 63\]: its address is .*, expected a multiple of 16 bytes"):
        gemm.store(a[:, 1:], b[:, 1:], out)
    odd = torch.zeros(8, 72, device=DEVICE).to(E4M3)[:, :64]
    with pytest.raises(CudaCallError, match=r"B \[8, 64\]: its stride between rows is 72, expected a multiple of 16"):
        gemm.store(a, odd, out)
    with pytest.raises(CudaCallError, match=r"the output \[4, 8\]: its stride between rows is 20, expected a multiple"):
        gemm.store(a, b, torch.zeros(4, 10, dtype=BF16, device=DEVICE)[:, :8])
