"""Where csrc/decode/kv_block.cuh puts K and V, said slowly: through the A fragments fed to the MMA."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

PAGE_TOKENS = 64


def a_fragment(lane: int, register: int, half: int) -> tuple[int, int]:
    """Row and column of the 16 x 16 tile that a lane's register holds in mma.sync.m16n8k16 (PTX ISA)."""
    return lane // 4 + 8 * (register % 2), 2 * (lane % 4) + half + 8 * (register // 2)


def _fragments() -> list[tuple[int, int, int, int, int]]:
    return [(n, r, h, *a_fragment(n, r, h)) for n in range(32) for r in range(4) for h in range(2)]


def block_bytes(bits: int, dim: int) -> int:
    """Bytes of a block: codes and two scale words a token, or two 16-bit rows a token."""
    return PAGE_TOKENS * (dim + 8) if bits == 4 else PAGE_TOKENS * dim * 4


@functools.cache
def int4_nibbles(dim: int) -> tuple[Tensor, Tensor]:
    """Nibble of each code of K and of V in its block, int64 [64, dim] each; nibble 2 i is the low one of byte i."""
    pairs, tiles = dim // 32, dim // 16
    last_keys = PAGE_TOKENS * 4 * pairs
    values = last_keys + (tiles % 2) * 128
    last_values = values + last_keys
    keys_at, values_at = (torch.full((PAGE_TOKENS, dim), -1) for _ in range(2))
    for tokens in range(4):
        for tile in range(tiles):
            for lane, register, half, row, col in _fragments():
                row_high, col_high = register % 2, register // 2
                if tile < 2 * pairs:
                    key_word = ((2 * tokens + row_high) * 32 + lane) * pairs + tile // 2
                    value_word = values + ((2 * tokens + col_high) * 32 + lane) * pairs + tile // 2
                    key_nibble, value_nibble = 2 * col_high + tile % 2, 2 * row_high + tile % 2
                else:
                    key_word, value_word = (first + tokens * 32 + lane for first in (last_keys, last_values))
                    key_nibble, value_nibble = 2 * row_high + col_high, 2 * col_high + row_high
                keys_at[16 * tokens + row, 16 * tile + col] = 8 * key_word + 4 * half + key_nibble
                values_at[16 * tokens + col, 16 * tile + row] = 8 * value_word + 4 * half + value_nibble
    return keys_at, values_at


def int4_scale_words(dim: int) -> tuple[Tensor, Tensor]:
    """32-bit word of each token's scale (low half) and zero point of K and of V, int64 [64] each."""
    token = torch.arange(PAGE_TOKENS)
    place = token % 8 * 8 + token // 8
    first = PAGE_TOKENS * dim // 4
    return first + place, first + PAGE_TOKENS + place


@functools.cache
def bf16_elements(dim: int) -> tuple[Tensor, Tensor]:
    """16-bit element of each number of K and of V in its block, int64 [64, dim] each."""
    tiles = dim // 16
    keys_at, values_at = (torch.full((PAGE_TOKENS, dim), -1) for _ in range(2))
    for tokens in range(4):
        for tile in range(tiles):
            for lane, register, half, row, col in _fragments():
                octet = 2 * tokens + register % 2
                key = ((octet * tiles + tile) * 32 + lane) * 4 + register // 2 * 2 + half
                value = PAGE_TOKENS * dim + ((tokens * tiles + tile) * 32 + lane) * 8 + register * 2 + half
                keys_at[16 * tokens + row, 16 * tile + col] = key
                values_at[16 * tokens + col, 16 * tile + row] = value
    return keys_at, values_at


def pack_int4(codes: tuple[Tensor, Tensor], words: tuple[Tensor, Tensor], dim: int) -> Tensor:
    """Blocks uint8 [n, bytes] from codes of K and V uint8 [n, 64, dim] and their scale words int32 [n, 64]."""
    count, device = codes[0].shape[0], codes[0].device
    nibbles = torch.zeros(count, 2 * block_bytes(4, dim), dtype=torch.uint8, device=device)
    for place, code in zip(int4_nibbles(dim), codes, strict=True):
        nibbles[:, place.to(device).flatten()] = code.flatten(1)
    blocks = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    for place, word in zip(int4_scale_words(dim), words, strict=True):
        blocks.view(torch.int32)[:, place.to(device)] = word
    return blocks


def unpack_int4(blocks: Tensor, dim: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The inverse of `pack_int4`."""
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    keys_at, values_at = (place.to(blocks.device) for place in int4_nibbles(dim))
    key_words, value_words = (place.to(blocks.device) for place in int4_scale_words(dim))
    words = blocks.view(torch.int32)
    return (nibbles[:, keys_at], nibbles[:, values_at]), (words[:, key_words], words[:, value_words])


def pack_bf16(keys: Tensor, values: Tensor) -> Tensor:
    """Blocks uint8 [n, bytes] from K and V BF16 [n, 64, dim]."""
    count, _, dim = keys.shape
    elements = torch.zeros(count, block_bytes(16, dim) // 2, dtype=torch.bfloat16, device=keys.device)
    for place, x in zip(bf16_elements(dim), (keys, values), strict=True):
        elements[:, place.to(keys.device).flatten()] = x.flatten(1)
    return elements.view(torch.uint8)


def unpack_bf16(blocks: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_bf16`."""
    elements = blocks.view(torch.bfloat16)
    keys_at, values_at = (place.to(blocks.device) for place in bf16_elements(dim))
    return elements[:, keys_at], elements[:, values_at]
