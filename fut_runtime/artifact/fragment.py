"""Packs INT4 codes and scales into fragment order and back.

This module and `orders.py` are the only ones that know where a code lies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fut_runtime.artifact.orders import (
    COL_BITS,
    DEFAULT_NIBBLE_ORDER,
    DEFAULT_SCALE_ORDER,
    LANES,
    NIBBLE_ORDERS,
    ROW_BITS,
    SCALE_ORDERS,
    TILE_COLS,
    TILE_ROWS,
    WORDS,
    NibbleOrder,
    nibble_order,
    scale_rows,
)
from fut_runtime.errors import ArtifactError

__all__ = [
    "DEFAULT_NIBBLE_ORDER",
    "DEFAULT_SCALE_ORDER",
    "NIBBLE_ORDERS",
    "SCALE_ORDERS",
    "pack_codes",
    "pack_scales",
    "unpack_codes",
    "unpack_scales",
]

#: Codes handled at once. On a CPU the intermediate copies stay in a core's cache, and each operation below PyTorch's
#: threshold for starting threads: thousands of short parallel regions stall on a machine that is busy elsewhere.
_CHUNK_CODES_CPU = 1 << 18
_CHUNK_CODES_GPU = 1 << 27


def _tiles_per_chunk(codes: Tensor) -> int:
    chunk_codes = _CHUNK_CODES_CPU if codes.device.type == "cpu" else _CHUNK_CODES_GPU
    return max(1, chunk_codes // (TILE_ROWS * codes.shape[1]))


def pack_codes(codes: Tensor, order: str = DEFAULT_NIBBLE_ORDER) -> Tensor:
    """Pack INT4 codes into fragment order.

    Args:
        codes: uint8 [N, K], values 0..15, N a multiple of 16 and K of 64; any device.
        order: name in NIBBLE_ORDERS.

    Returns:
        int32 [N/16, K/64, 32 lanes, 4 words]; nibble i of a word is its bits 4i..4i+3.

    Raises:
        ArtifactError: unknown order, wrong dtype or shape, or a code above 15.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[0] % TILE_ROWS or codes.shape[1] % TILE_COLS:
        raise ArtifactError(
            f"INT4 codes are {codes.dtype} {tuple(codes.shape)}, expected torch.uint8 [N, K] "
            f"with N a multiple of {TILE_ROWS} and K of {TILE_COLS}; pad the matrix first"
        )
    if codes.numel() and int(codes.max()) >= 1 << 4:
        raise ArtifactError(f"INT4 codes reach {int(codes.max())}, expected 0..15")
    table = nibble_order(order)
    tiles, k_tiles = codes.shape[0] // TILE_ROWS, codes.shape[1] // TILE_COLS
    packed = torch.empty((tiles, k_tiles, LANES, WORDS), dtype=torch.int32, device=codes.device)
    pack = _pack_octets if table.has_octets else _pack_bytes
    codes = codes.contiguous()
    step = _tiles_per_chunk(codes)
    for start in range(0, tiles, step):
        chunk = codes[TILE_ROWS * start : TILE_ROWS * (start + step)]
        pack(chunk.view(-1, TILE_ROWS, k_tiles, TILE_COLS), packed[start : start + step], table)
    return packed


def unpack_codes(words: Tensor, order: str = DEFAULT_NIBBLE_ORDER) -> Tensor:
    """Undo `pack_codes`.

    Args:
        words: int32 [N/16, K/64, 32, 4], any device.
        order: name in NIBBLE_ORDERS.

    Returns:
        uint8 [N, K], values 0..15.

    Raises:
        ArtifactError: unknown order, wrong dtype or shape.
    """
    if words.dtype != torch.int32 or words.dim() != 4 or words.shape[2:] != (LANES, WORDS):
        raise ArtifactError(
            f"packed INT4 weights are {words.dtype} {tuple(words.shape)}, expected torch.int32 [N/16, K/64, 32, 4]"
        )
    table = nibble_order(order)
    tiles, k_tiles = words.shape[:2]
    codes = torch.empty((tiles * TILE_ROWS, k_tiles * TILE_COLS), dtype=torch.uint8, device=words.device)
    unpack = _unpack_octets if table.has_octets else _unpack_bytes
    words = words.contiguous()
    step = _tiles_per_chunk(codes)
    for start in range(0, tiles, step):
        chunk = codes[TILE_ROWS * start : TILE_ROWS * (start + step)]
        unpack(words[start : start + step], chunk.view(-1, TILE_ROWS, k_tiles, TILE_COLS), table)
    return codes


# The four functions below move one chunk: codes uint8 [tiles, 16, k_tiles, 64], words int32 [tiles, k_tiles, 32, 4].


def _byte_axes(order: NibbleOrder) -> tuple[int, list[int]]:
    """The axis that tells the nibbles of a byte apart, and the permutation of the others into stored order."""
    names = ["tile", *ROW_BITS, "k_tile", *COL_BITS]
    split = names.index(order.bits[-1])
    del names[split]
    return split, [names.index(bit) for bit in ("tile", "k_tile", *order.bits[:-1])]


def _pack_bytes(codes: Tensor, words: Tensor, order: NibbleOrder) -> None:
    """Any order: join the two nibbles of each byte, then permute bytes."""
    tiles, k_tiles = words.shape[:2]
    split, axes = _byte_axes(order)
    bits = codes.view(tiles, 2, 2, 2, 2, k_tiles, 2, 2, 2, 2, 2, 2)
    pairs = bits.select(split, 1) << 4
    pairs |= bits.select(split, 0)
    words.view(torch.uint8).view(tiles, k_tiles, *(2,) * 9).copy_(pairs.permute(axes))


def _unpack_bytes(words: Tensor, codes: Tensor, order: NibbleOrder) -> None:
    tiles, k_tiles = words.shape[:2]
    split, axes = _byte_axes(order)
    stored = words.view(torch.uint8).view(tiles, k_tiles, *(2,) * 9)
    pairs = stored.permute([axes.index(axis) for axis in range(len(axes))]).contiguous()
    bits = codes.view(tiles, 2, 2, 2, 2, k_tiles, 2, 2, 2, 2, 2, 2)
    bits.select(split, 0).copy_(pairs & 15)
    bits.select(split, 1).copy_(pairs >> 4)


_EVEN_BYTES = 0x00FF00FF00FF00FF
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F


def _octet_axes(order: NibbleOrder) -> tuple[int, int, list[int]]:
    """Axes of nibble bits 0 and 1 (the second counted once the first is gone), and the permutation of words."""
    names = ["tile", *ROW_BITS, "k_tile", "k5", "k4", "k3", "k2", "k1"]
    low = names.index(order.nibble[2])
    del names[low]
    high = names.index(order.nibble[1])
    del names[high]
    return low, high, [names.index(bit) for bit in ("tile", "k_tile", *order.lane, *order.word)]


def _pack_octets(codes: Tensor, words: Tensor, order: NibbleOrder) -> None:
    """MMA orders, five times faster than byte by byte: eight adjacent codes of a row are one 64-bit integer.

    Joining two such octets makes eight bytes (k2 k1 k0) of two nibbles; interleaving the bytes of two of those,
    a and b, makes four words: word (k2 k1) is a[k0=0], b[k0=0], a[k0=1], b[k0=1] from the lowest byte up.
    """
    tiles, k_tiles = words.shape[:2]
    low, high, axes = _octet_axes(order)
    octets = codes.view(torch.int64).view(tiles, 2, 2, 2, 2, k_tiles, 2, 2, 2)
    joined = octets.select(low, 1) << 4
    joined |= octets.select(low, 0)
    a, b = joined.select(high, 0), joined.select(high, 1)
    lower = (b & _EVEN_BYTES) << 8
    lower |= a & _EVEN_BYTES
    upper = a >> 8 & _EVEN_BYTES
    upper |= b & ~_EVEN_BYTES
    halves = torch.stack((lower.view(torch.int16), upper.view(torch.int16)), dim=-1)
    natural = halves.view(torch.int32).view(*a.shape, 2, 2).permute(axes)
    words.view(natural.shape).copy_(natural)


def _unpack_octets(words: Tensor, codes: Tensor, order: NibbleOrder) -> None:
    tiles, k_tiles = words.shape[:2]
    low, high, axes = _octet_axes(order)
    natural = words.view(tiles, k_tiles, *(2,) * 7).permute([axes.index(axis) for axis in range(len(axes))])
    halves = natural.contiguous().view(torch.int16).view(*natural.shape[:-2], 4, 2)
    lower = halves[..., 0].contiguous().view(torch.int64)[..., 0]
    upper = halves[..., 1].contiguous().view(torch.int64)[..., 0]
    a = (upper & _EVEN_BYTES) << 8
    a |= lower & _EVEN_BYTES
    b = lower >> 8 & _EVEN_BYTES
    b |= upper & ~_EVEN_BYTES
    octets = codes.view(torch.int64).view(tiles, 2, 2, 2, 2, k_tiles, 2, 2, 2)
    for value, joined in enumerate((a, b)):
        half = octets.select(low, 0).select(high, value), octets.select(low, 1).select(high, value)
        torch.bitwise_and(joined, _LOW_NIBBLES, out=half[0])
        torch.bitwise_and(joined >> 4, _LOW_NIBBLES, out=half[1])


def pack_scales(scales: Tensor, order: str = DEFAULT_SCALE_ORDER) -> Tensor:
    """Bring group scales into the order in which a lane loads those of its two rows with one 32-bit load.

    Args:
        scales: [N, K/g], any dtype, N a multiple of 16.
        order: name in SCALE_ORDERS.

    Returns:
        [N/16, K/g, 16], same dtype.

    Raises:
        ArtifactError: unknown order, or N not in whole tiles.
    """
    rows = list(scale_rows(order))
    if scales.dim() != 2 or scales.shape[0] % TILE_ROWS:
        raise ArtifactError(f"scales are {tuple(scales.shape)}, expected [N, K/g] with N a multiple of {TILE_ROWS}")
    return scales.reshape(-1, TILE_ROWS, scales.shape[1])[:, rows].transpose(1, 2).contiguous()


def unpack_scales(packed: Tensor, order: str = DEFAULT_SCALE_ORDER) -> Tensor:
    """Undo `pack_scales`: [N/16, K/g, 16] -> [N, K/g], same dtype.

    Raises:
        ArtifactError: unknown order or wrong shape.
    """
    rows = list(scale_rows(order))
    if packed.dim() != 3 or packed.shape[2] != TILE_ROWS:
        raise ArtifactError(f"packed scales are {tuple(packed.shape)}, expected [N/16, K/g, {TILE_ROWS}]")
    inverse = [rows.index(row) for row in range(TILE_ROWS)]
    return packed[:, :, inverse].transpose(1, 2).reshape(-1, packed.shape[1])


def dequantize_int4(codes: Tensor, scales: Tensor) -> Tensor:
    """(code - 8) · scale, float32 [N, K]: codes uint8 [N, K] in 0..15, scales [N, K / group_size] of any float type."""
    levels: Tensor = codes.unflatten(1, (scales.shape[1], -1)).to(torch.float32)
    levels -= 8
    levels *= scales.to(torch.float32)[..., None]
    return levels.flatten(1)
