"""INT4 codes in groups, as quantized checkpoints bring them: unpacked, dequantized, or kept where the artifact can.

weight[n, k] = (code[n, k] - zero[n, g]) · scale[n, g], g the group of column k. The artifact's INT4 is the same with
zero 8, groups of 32, 64 or 128 neighbouring columns, and scales in BF16 or FP16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

#: The zero point of a symmetric matrix, and the artifact's.
SYMMETRIC_ZERO = 8
#: Group sizes that codes are kept in, best first.
KEPT_GROUPS: tuple[int, ...] = (128, 64, 32)
#: Scale types that are kept, by safetensors name, and the artifact's names of them.
KEPT_SCALES: dict[str, str] = {"F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Grouping:
    """How the codes of one matrix are to be read.

    Attributes:
        size: columns a group; the last group may have fewer.
        count: groups.
        zeros: uint8 [out, groups], or None where every zero point is 8.
        index: int64 [in], the group of each column, or None where column k is in group k // size.
    """

    size: int
    count: int
    zeros: Tensor | None = None
    index: Tensor | None = None


@dataclass(frozen=True)
class Packing:
    """Whether the codes of a quantized matrix can be kept.

    Attributes:
        method: what the artifact records as method of such codes, `packed:` and the format's name.
        group_sizes: the artifact's group sizes in which the codes and scales can be kept, largest first.
        scale_dtype: the artifact's name of the scales' type.
        obstacle: why they cannot be kept, or None.
    """

    method: str
    group_sizes: tuple[int, ...] = ()
    scale_dtype: str = ""
    obstacle: str | None = None


def unpack_nibbles(words: Tensor) -> Tensor:
    """The eight nibbles of each word, lowest first: int32 [...] -> uint8 [..., 8]."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def packing(method: str, grouping: Grouping, columns: int, scale_dtype: str) -> Packing:
    """Whether codes [out, columns] in this grouping, with scales of this safetensors type, can be kept."""
    if grouping.index is not None:
        return Packing(method, obstacle="act-order has permuted its columns over the groups (g_idx)")
    if grouping.zeros is not None:
        return Packing(method, obstacle="it is asymmetric (zero points other than 8)")
    if scale_dtype not in KEPT_SCALES:
        return Packing(method, obstacle=f"its scales are {scale_dtype}")
    # One group over all columns may be cut anywhere.
    sizes = tuple(g for g in KEPT_GROUPS if grouping.count == 1 or grouping.size % g == 0)
    if not sizes:
        return Packing(method, obstacle=f"its groups are of {grouping.size} columns, no multiple of {KEPT_GROUPS[-1]}")
    if grouping.count == 1:
        # Cutting leaves a rest that is padded: no larger than it must be.
        sizes = tuple(sorted(sizes, key=lambda g: (columns % g != 0, -g)))
    return Packing(method, sizes, KEPT_SCALES[scale_dtype])


def dequantize(codes: Tensor, scales: Tensor, grouping: Grouping) -> Tensor:
    """The weights, exact in FP32: codes uint8 [out, in], scales [out, groups] -> float32 [out, in]."""
    scales = scales.to(torch.float32)
    index = grouping.index
    if index is None and codes.shape[1] != grouping.size * grouping.count:
        index = torch.arange(codes.shape[1]) // grouping.size
    if index is None:
        levels: Tensor = codes.to(torch.float32).unflatten(1, (grouping.count, grouping.size))
        levels -= SYMMETRIC_ZERO if grouping.zeros is None else grouping.zeros[..., None]
        levels *= scales[..., None]
        return levels.flatten(1)
    levels = codes.to(torch.float32)
    levels -= SYMMETRIC_ZERO if grouping.zeros is None else grouping.zeros[:, index]
    levels *= scales[:, index]
    return levels


def regrouped(codes: Tensor, scales: Tensor, grouping: Grouping, size: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes and scales in smaller groups and with padding, without changing a weight.

    Args:
        codes: uint8 [out, in], symmetric and in contiguous groups.
        scales: [out, groups].
        size: the new group size, one of `Packing.group_sizes`.
        columns: columns to pad to, a multiple of `size`, with code 8.
    """
    groups = columns // size
    extra = columns - codes.shape[1]
    if grouping.count == 1:
        wide = scales.expand(-1, groups)
    else:
        wide = scales.repeat_interleave(grouping.size // size, dim=1)[:, :groups]
    if wide.shape[1] < groups:
        # A bit pattern of zeros is the number 0 in every type.
        wide = pad(wide, (0, groups - wide.shape[1]))
    return (pad(codes, (0, extra), value=SYMMETRIC_ZERO) if extra else codes), wide.contiguous()
