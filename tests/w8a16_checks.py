"""What products of E4M3 weights with 16-bit activations must fulfil, on a card and in the emulation."""

from __future__ import annotations

import torch

from fut_runtime.cuda import w8a16
from fut_runtime.cuda.w8a16 import W8A16Plan
from gemm_matrices import E4M3, close, device, operand, poisoned, untouched, vector

#: Of sums in units of their terms' magnitudes, and of 16-bit outputs.
SUM_TOLERANCE = 1e-5
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0.0}


#: Channels and tokens of every tile.
TILES = [(128, 16), (128, 32), (128, 64), (128, 128), (128, 256), (64, 16), (64, 32), (64, 64)]


def workspace_bytes(m: int, n: int, channels: int, tokens: int, splits: int) -> int:
    """Sums of every part in FP32, and a counter for every 64 channels of a tile."""
    tiles = -(-m // tokens) * -(-n // channels)
    return 0 if splits == 1 else tiles * (splits * 4 * channels * tokens + 4 * channels // 64)


def check_product(m: int, n: int, k: int, dtype: torch.dtype, channels: int, tokens: int, splits: int) -> None:
    """Both outputs, one alpha and one a channel, twice with one workspace; nothing outside of the output is written."""
    a, b = operand(m, k, dtype, m + k), operand(n, k, E4M3, 100003 + n + k)
    # Codes of every size, subnormal ones included.
    b.view(torch.uint8)[: min(n, 8)] = (torch.arange(k, device=device()) % 126).to(torch.uint8)
    expected = a.double() @ b.double().T
    magnitude = a.double().abs() @ b.double().abs().T
    chosen = W8A16Plan(channels, tokens, splits, workspace_bytes(m, n, channels, tokens, splits))
    workspace = torch.zeros(chosen.workspace_bytes, dtype=torch.uint8, device=device())
    for alpha, bias in ((vector(1, 1) * 0.01, None), (vector(n, 2) * 0.01, vector(n, 3))):
        scaled = expected * alpha.double() + (0 if bias is None else bias.double())
        for out_dtype in (dtype, torch.float32):
            out, again = poisoned(m, n, out_dtype), poisoned(m, n, out_dtype)
            for target in (out, again):
                w8a16.multiply(a, b, alpha, bias, target, chosen, workspace if splits > 1 else None)
            allowed = magnitude * alpha.double() * SUM_TOLERANCE + scaled.abs() * ROUNDING[out_dtype] + 1e-7
            assert close(out, scaled, allowed), (m, n, k, dtype, out_dtype, chosen)
            assert torch.equal(out, again) and untouched(out)
