"""What prefill's products must fulfil, for tests on a card and for tests in the emulation."""

from __future__ import annotations

import torch

from fut_runtime.cuda import gemm
from fut_runtime.cuda.gemm import SQUARE_COLUMNS, History, Quantized, Scales, Tuning
from fut_runtime.cuda.structs import PAGE_TOKENS, Accumulation
from fut_runtime.reference.layer import head_norm
from fut_runtime.reference.numerics import to_e4m3
from fut_runtime.reference.rope import apply_rope
from gemm_matrices import E4M3, Product, close, device, operand, poisoned, relative, untouched, vector

BF16 = torch.bfloat16
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


def check_store(m: int, n: int, k: int, dtype: torch.dtype, tile: tuple[int, int]) -> None:
    """The product itself in FP32 and BF16; nothing outside of the output is written."""
    product = Product.random(m, n, k, dtype)
    expected = product.sum
    for accumulation in Accumulation:
        allowed = product.magnitude * tolerance(dtype, accumulation)
        for out in (poisoned(m, n, torch.float32), poisoned(m, n, BF16)):
            gemm.store(product.a, product.b, out, tuning=tuning(accumulation, tile))
            rounding = expected.abs() * (BF16_TOLERANCE if out.dtype == BF16 else 0)
            assert close(out, expected, allowed + rounding), (m, n, k, accumulation)
            assert untouched(out), (m, n, k)


def check_scales(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Every factor and the bias, of rows that belong to three requests."""
    requests = 3
    product = Product.random(m, n, k, dtype)
    row, channel, bias, scale = vector(m, 1), vector(n, 2), vector(n, 3) * 100, vector(requests, 4)
    request = torch.arange(m, device=device(), dtype=torch.int32) // (m // 3 + 1)
    sums = vector(m * 5, 5).view(m, 5) * 1000
    rho = (sums.double().sum(1) / k + 1e-5).rsqrt()
    factors = (row * scale[request.long()]).double()[:, None] * rho[:, None] * channel.double()
    scales = Scales(row, sums, 1e-5, scale, request, channel, bias)
    allowed = tolerance(dtype, Accumulation.PROMOTED)
    for given, factor in ((scales, factors), (Scales(bias=bias), torch.ones_like(factors))):
        out = poisoned(m, n, torch.float32)
        gemm.store(product.a, product.b, out, given, tuning(Accumulation.PROMOTED))
        assert close(out, product.sum * factor + bias.double(), product.magnitude * factor * allowed + 1e-4)


def check_company(m: int, n: int, k: int, accumulation: Accumulation) -> None:
    """A row is the same, bit for bit, in every tile, with fewer rows, alone, and again."""
    product = Product.random(m, n, k, E4M3)
    outs = []
    for tile in [*TILES, (0, 0)]:
        for rows in (m, m, 129, 1):
            out = poisoned(rows, n, torch.float32)
            gemm.store(product.a[:rows], product.b, out, tuning=tuning(accumulation, tile))
            outs.append(out)
    assert all(torch.equal(out, outs[0][: len(out)]) for out in outs)


def check_residual(m: int, n: int, k: int, dtype: torch.dtype, tile: tuple[int, int]) -> None:
    """The new residual, its E4M3 copy with maxima and counts of three requests, and its squares; and no copy."""
    product = Product.random(m, n, k, dtype)
    before = operand(m, n, BF16, 5)
    channel, requests = vector(n, 1) * 0.1, torch.arange(m, device=device(), dtype=torch.int32) // 70
    scale = vector(3, 2) * 0.02
    for accumulation in Accumulation if tile[0] == 128 else [Accumulation.FAST]:
        h = poisoned(m, n, BF16)
        h.copy_(before)
        amax, saturated = torch.zeros(3, device=device()), torch.zeros(1, dtype=torch.int64, device=device())
        copy = Quantized(poisoned(m, n, E4M3), scale, amax, saturated)
        sums = torch.full((m, -(-n // SQUARE_COLUMNS)), torch.nan, device=device())
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


def check_swiglu(m: int, channels: int, k: int, dtype: torch.dtype, tile: tuple[int, int]) -> None:
    """silu(gate) · up in E4M3, its maximum and its count."""
    product = Product.random(m, 2 * channels, k, dtype)
    factor = vector(m, 1) * 0.02
    scale = torch.tensor([0.004], device=device())
    amax, saturated = torch.zeros(1, device=device()), torch.zeros(1, dtype=torch.int64, device=device())
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


def check_swiglu_bf16(m: int, channels: int, k: int, dtype: torch.dtype, tile: tuple[int, int]) -> None:
    """silu(gate) · up in BF16."""
    product = Product.random(m, 2 * channels, k, dtype)
    factor = vector(m, 1) * 0.02
    out = poisoned(m, channels, BF16)
    gemm.swiglu_bf16(product.a, product.b, out, Scales(row_factor=factor), tuning(Accumulation.PROMOTED, tile))
    both = product.sum * factor.double()[:, None]
    error = product.magnitude * factor.double()[:, None] * tolerance(dtype, Accumulation.PROMOTED)
    gate, up = both[:, ::2], both[:, 1::2]
    expected = torch.nn.functional.silu(gate) * up
    allowed = expected.abs() * 2**-8 + 1e-6
    allowed += 1.1 * up.abs() * error[:, ::2] + torch.nn.functional.silu(gate).abs() * error[:, 1::2]
    assert close(out, expected, allowed), (m, channels, k)
    assert untouched(out)


def check_infinite_maximum() -> None:
    """A maximum that is not finite is recorded as one."""
    product = Product.random(130, 256, 128, BF16)
    product.a[129, 5] = torch.inf
    amax = torch.zeros(1, device=device())
    gemm.swiglu(product.a, product.b, Quantized(poisoned(130, 128, E4M3), torch.ones(1, device=device()), amax))
    assert not bool(amax.isfinite().any())


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
    history = History.empty(table.to(device(), torch.int32), table.numel(), kv_heads, head_dim)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    every = torch.arange(640)[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    rope = (every.cos().to(device()), every.sin().to(device()))
    norms = (vector(head_dim, 1), vector(head_dim, 2)) if heads % 2 else None
    channel, bias = vector(n, 3) * 0.05, vector(n, 4)
    found = gemm.qkv(
        product.a, product.b, history, positions.to(device(), torch.int32), slots.to(device(), torch.int32), rope,
        norms=norms, scales=Scales(channel=channel, bias=bias), tuning=tuning(Accumulation.PROMOTED, tile),
    )  # fmt: skip
    both = (product.sum * channel.double() + bias.double()).view(m, -1, head_dim)
    q, k_heads, v = both.split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k_heads = head_norm(q, norms[0], 1e-6), head_norm(k_heads, norms[1], 1e-6)
    turns = (angles.cos().to(device()), angles.sin().to(device()))
    q, k_heads = apply_rope(q, *turns), apply_rope(k_heads, *turns)
    page, place = table[slots, positions // PAGE_TOKENS].to(device()), (positions % PAGE_TOKENS).to(device())
    allowed = BF16_TOLERANCE if dtype == BF16 else 2e-2
    assert relative(found, q) <= allowed
    assert relative(history.keys[page, :, place], k_heads) <= allowed
    assert relative(history.values[page, :, place], v) <= allowed
    for written in (history.keys, history.values):
        written[page, :, place] = torch.nan
        assert bool(written.isnan().all())
