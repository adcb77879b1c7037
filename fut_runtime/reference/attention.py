"""Causal grouped-query attention of one request, over BF16 history (prefill) or the quantised cache (decode)."""

from __future__ import annotations

import torch
from torch import Tensor

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.reference.kv_quant import QuantizedHeads
from fut_runtime.reference.numerics import Numerics
from fut_runtime.reference.rotation import rotate

#: Queries handled at a time: bounds the score matrix to heads x 512 x context.
QUERY_BLOCK = 512


def attend(q: Tensor, k: Tensor, v: Tensor, numerics: Numerics) -> Tensor:
    """Attention over 16-bit K and V.

    q [queries, heads, head_dim] belongs to the last `queries` positions of k and v [context, kv_heads, head_dim].
    The softmax runs in the compute dtype; P (relative to the row maximum) is rounded to 16 bits as an MMA operand, the
    denominator is the sum of the unrounded P. Returns [queries, heads, head_dim].
    """
    queries, heads, dim = q.shape
    context, kv_heads, _ = k.shape
    k, v = k.to(numerics.dtype).transpose(0, 1), v.to(numerics.dtype).transpose(0, 1)
    blocks = []
    for first in range(0, queries, QUERY_BLOCK):
        block = q[first : first + QUERY_BLOCK].unflatten(1, (kv_heads, heads // kv_heads))
        seen = context - queries + first + block.shape[0]
        scores = torch.einsum("qghd,gkd->ghqk", block, k[:, :seen]) * dim**-0.5
        p, total = _softmax(scores)
        out = torch.einsum("ghqk,gkd->qghd", numerics.round16(p), v[:, :seen])
        blocks.append((out / total.permute(2, 0, 1, 3)).flatten(1, 2))
    return torch.cat(blocks)


def attend_quantized(
    q: Tensor, k: QuantizedHeads, v: QuantizedHeads, spec: KVCacheSpec, signs: Tensor, numerics: Numerics
) -> Tensor:
    """Attention over the INT4 cache, with scales and zero points outside the inner products.

    S = s_k (q·codes) + z_k Σq and O = Σ (p s_v) codes + Σ p z_v, q rotated like K and the output rotated back, unless
    the weights take it rotated.
    Shapes as in `attend`. q is rounded to 16 bits as an MMA operand; p·s_v is not, since codes are up to five times the
    spread of the values they stand for and would multiply its rounding (the kernels keep 11 bits of it).
    """
    queries, heads, dim = q.shape
    context, kv_heads, _ = k.codes.shape
    dtype = numerics.dtype
    if spec.rotation:
        q = rotate(q, signs)
    q = numerics.round16(q)
    k_codes, v_codes = k.codes.to(dtype).transpose(0, 1), v.codes.to(dtype).transpose(0, 1)
    k_scale, k_zero, v_scale, v_zero = (t.to(dtype).T[:, None, None, :] for t in (k.scale, k.zero, v.scale, v.zero))
    blocks = []
    for first in range(0, queries, QUERY_BLOCK):
        block = q[first : first + QUERY_BLOCK].unflatten(1, (kv_heads, heads // kv_heads))
        seen = context - queries + first + block.shape[0]
        products = torch.einsum("qghd,gkd->ghqk", block, k_codes[:, :seen])
        sums = block.sum(dim=-1).permute(1, 2, 0)[..., None]
        scores = (products * k_scale[..., :seen] + sums * k_zero[..., :seen]) * dim**-0.5
        p, total = _softmax(scores)
        out = torch.einsum("ghqk,gkd->qghd", p * v_scale[..., :seen], v_codes[:, :seen])
        shift = (p * v_zero[..., :seen]).sum(dim=-1, keepdim=True)
        blocks.append(((out + shift.permute(2, 0, 1, 3)) / total.permute(2, 0, 1, 3)).flatten(1, 2))
    out = torch.cat(blocks)
    return rotate(out, signs) if spec.rotates_v else out


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator exp(s - max) under the causal mask and its row sums; scores [kv_heads, group, queries, keys]."""
    queries, keys = scores.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    p = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return p, p.sum(dim=-1, keepdim=True)
