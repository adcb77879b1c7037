"""Calibration's products and attention: BF16 operands, FP32 sums, by whichever instructions are fastest here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fut_runtime.reference.projection import Projection


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies BF16 matrices faster than FP32 ones: a GPU does, and of CPUs those with AMX.

    Elsewhere FP32 is 1.5 to 1.8 times as fast (AVX-512 with BF16 dot products), and products of BF16 numbers are exact
    in it; sums differ by their order only.
    """
    return device.type != "cpu" or _has_amx()


def _has_amx() -> bool:
    # Older versions of PyTorch do not say; FP32 is right everywhere.
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is not None and bool(capabilities().get("amx_bf16", False))


@dataclass(frozen=True)
class SixteenBitProjection(Projection):
    """A projection that multiplies BF16 numbers with FP32 accumulation."""

    def accumulate(self, x: Tensor) -> Tensor:
        """Accumulator of x [tokens, in], rounded to BF16 on its way out: float32 [tokens, out]."""
        assert isinstance(self.weight, Tensor)
        x = x.bfloat16()
        if multiplies_bfloat16(x.device):
            return (x @ self.weight.T).float()
        return (x.float() @ self.weight.float().T).bfloat16().float()


def causal_attention(q: Tensor, k: Tensor, v: Tensor, windows: int) -> Tensor:
    """Causal attention inside each of `windows` windows that lie one after another.

    q, k and v [tokens, heads, head_dim] (k and v of fewer heads) are rounded to BF16; so is the output, float32 like q.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.bfloat16().unflatten(0, (windows, -1)).transpose(1, 2) for x in (q, k, v))
    if not multiplies_bfloat16(q.device):
        q, k, v = q.float(), k.float(), v.float()
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.bfloat16().transpose(1, 2).flatten(0, 1).float()
