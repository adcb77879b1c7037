"""Fragment order against slow NumPy twins: what each lane holds, and the whole MMA on packed words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fut_runtime.artifact.fragment import (
    DEFAULT_NIBBLE_ORDER,
    DEFAULT_SCALE_ORDER,
    NIBBLE_ORDERS,
    SCALE_ORDERS,
    pack_codes,
    pack_scales,
    unpack_codes,
    unpack_scales,
)
from fut_runtime.errors import ArtifactError

PAIR = "mma_m16n8k16_a_pair/1"
SINGLE = "mma_m16n8k16_a/1"


def a_fragment_element(lane: int, register: int, half: int) -> tuple[int, int]:
    """Row and k of half a register of the A operand of mma.m16n8k16, 16-bit types, from the PTX ISA."""
    group, thread_in_group = lane >> 2, lane & 3
    row = group + 8 if register in (1, 3) else group
    k = 2 * thread_in_group + half + (8 if register in (2, 3) else 0)
    return row, k


def slow_pack(codes: NDArray[np.uint8], order: str) -> NDArray[np.uint32]:
    """Nibble by nibble, each order as its prose describes it."""
    rows, cols = codes.shape
    words = np.zeros((rows // 16, cols // 64, 32, 4), np.uint32)
    for tile_row, tile_col, lane in np.ndindex(words.shape[:3]):
        tile = codes[16 * tile_row : 16 * tile_row + 16, 64 * tile_col : 64 * tile_col + 64]
        for k_tile in range(4):
            for register in range(4):
                for half in range(2):
                    row, k = a_fragment_element(lane, register, half)
                    if order == PAIR:
                        pair, member = divmod(k_tile, 2)
                        word, nibble = 2 * pair + (register >> 1), (register & 1) * 2 + member + 4 * half
                    else:
                        word, nibble = k_tile, register + 4 * half
                    words[tile_row, tile_col, lane, word] |= np.uint32(int(tile[row, 16 * k_tile + k]) << 4 * nibble)
    return words


def random_codes(rows: int, cols: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 16, (rows, cols), dtype=np.uint8)


def as_uint32(words: torch.Tensor) -> NDArray[np.uint32]:
    return words.numpy().view(np.uint32)


@pytest.mark.parametrize("order", [PAIR, SINGLE])
def test_lanes_hold_what_the_instruction_expects(order: str) -> None:
    codes = random_codes(32, 192)
    assert np.array_equal(as_uint32(pack_codes(torch.from_numpy(codes), order)), slow_pack(codes, order))


def test_linear_is_row_major() -> None:
    codes = random_codes(16, 64)
    packed = pack_codes(torch.from_numpy(codes), "linear/1").view(torch.uint8).numpy().reshape(-1)
    assert np.array_equal(packed & 15, codes.reshape(-1)[0::2])
    assert np.array_equal(packed >> 4, codes.reshape(-1)[1::2])


@pytest.mark.parametrize("order", sorted(NIBBLE_ORDERS))
def test_table_describes_the_packing(order: str) -> None:
    """`element` of the registry, which documents and C++ are checked against, agrees with what packing does."""
    codes = random_codes(16, 64)
    words = as_uint32(pack_codes(torch.from_numpy(codes), order))[0, 0]
    seen = set()
    for lane, word, nibble in np.ndindex(32, 4, 8):
        row, col = NIBBLE_ORDERS[order].element(lane, word, nibble)
        seen.add((row, col))
        assert int(words[lane, word]) >> 4 * nibble & 15 == codes[row, col]
    assert len(seen) == 16 * 64


@given(
    order=st.sampled_from(sorted(NIBBLE_ORDERS)),
    tiles=st.integers(1, 5),
    k_tiles=st.integers(1, 5),
    seed=st.integers(0),
)
def test_code_round_trip(order: str, tiles: int, k_tiles: int, seed: int) -> None:
    codes = torch.from_numpy(random_codes(16 * tiles, 64 * k_tiles, seed))
    words = pack_codes(codes, order)
    assert words.shape == (tiles, k_tiles, 32, 4) and words.dtype == torch.int32
    assert torch.equal(unpack_codes(words, order), codes)


def test_more_codes_than_one_chunk() -> None:
    codes = torch.from_numpy(random_codes(48, 64 * 300))
    for order in NIBBLE_ORDERS:
        words = pack_codes(codes, order)
        assert torch.equal(words[2:, 299:], pack_codes(codes[32:, 299 * 64 :].contiguous(), order))
        assert torch.equal(unpack_codes(words, order), codes)


@pytest.mark.gpu
def test_a_gpu_packs_the_same() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    codes = torch.from_numpy(random_codes(64, 640))
    for order in NIBBLE_ORDERS:
        words = pack_codes(codes.cuda(), order)
        assert torch.equal(words.cpu(), pack_codes(codes, order))
        assert torch.equal(unpack_codes(words, order).cpu(), codes)


def test_strided_input_packs_as_its_copy() -> None:
    codes = torch.from_numpy(random_codes(64, 32)).t()
    assert torch.equal(pack_codes(codes), pack_codes(codes.contiguous()))


@given(order=st.sampled_from(sorted(SCALE_ORDERS)), tiles=st.integers(1, 4), groups=st.integers(1, 5))
def test_scale_round_trip(order: str, tiles: int, groups: int) -> None:
    scales = torch.randn(16 * tiles, groups).bfloat16()
    packed = pack_scales(scales, order)
    assert packed.shape == (tiles, groups, 16) and packed.is_contiguous()
    assert torch.equal(unpack_scales(packed, order), scales)


def test_one_load_brings_a_lane_the_scales_of_its_rows() -> None:
    scales = torch.arange(32 * 3).view(32, 3)
    packed = pack_scales(scales, DEFAULT_SCALE_ORDER)
    for tile, group, g in np.ndindex(2, 3, 8):
        assert packed[tile, group, 2 * g] == scales[16 * tile + g, group]
        assert packed[tile, group, 2 * g + 1] == scales[16 * tile + g + 8, group]


def mma_m16n8k16(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """One mma.sync.m16n8k16 on registers: a [32, 4, 2], b [32, 2, 2], accumulator c [32, 4] -> [32, 4]."""
    a_matrix, b_matrix = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    for lane in range(32):
        for half in range(2):
            for register in range(4):
                a_matrix[a_fragment_element(lane, register, half)] = a[lane, register, half]
            for register in range(2):
                b_matrix[2 * (lane & 3) + half + 8 * register, lane >> 2] = b[lane, register, half]
    product = a_matrix @ b_matrix
    result = c.copy()
    for lane in range(32):
        for register in range(4):
            result[lane, register] += product[(lane >> 2) + 8 * (register >> 1), 2 * (lane & 3) + (register & 1)]
    return result


def halves_fp16(word: NDArray[np.uint32]) -> NDArray[np.float32]:
    """The two FP16 values of each 32-bit register, lower half first: [..., 2]."""
    return np.ascontiguousarray(word).view(np.float16).reshape(*word.shape, 2).astype(np.float32)


def pair_registers(words: NDArray[np.uint32], k_tile: int) -> NDArray[np.float32]:
    """A registers of one k16 tile from a lane's words by masks and one shift, the FP16 way: codes [32, 4, 2]."""
    registers = []
    for register in range(4):
        word = words[:, 2 * (k_tile // 2) + (register >> 1)] >> np.uint32(8 * (register & 1))
        if k_tile % 2 == 0:
            registers.append(halves_fp16(word & np.uint32(0x000F000F) | np.uint32(0x64006400)) - 1024)
        else:
            registers.append((halves_fp16(word & np.uint32(0x00F000F0) | np.uint32(0x64006400)) - 1024) / 16)
    return np.stack(registers, axis=1)


def single_registers(words: NDArray[np.uint32], k_tile: int) -> NDArray[np.float32]:
    """The same from `mma_m16n8k16_a/1`, the BF16 way: 128 + q has q in the lowest mantissa bits."""
    registers = []
    for register in range(4):
        bits = words[:, k_tile] >> np.uint32(4 * register) & np.uint32(0x000F000F) | np.uint32(0x43004300)
        low, high = (bits << np.uint32(16)).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)
        registers.append(np.stack((low, high), axis=-1) - 128)
    return np.stack(registers, axis=1)


@pytest.mark.parametrize(("order", "registers_of"), [(PAIR, pair_registers), (SINGLE, single_registers)])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_whole_instruction_on_packed_fragments(order: str, registers_of, group_size: int) -> None:  # type: ignore[no-untyped-def]
    """(q - 8)·s summed by emulated MMAs on the packed words equals the plain product W·x, for 8 tokens."""
    rng = np.random.default_rng(1)
    rows, cols, tokens = 32, 256, 8
    codes = random_codes(rows, cols)
    scales = rng.standard_normal((rows, cols // group_size)).astype(np.float32)
    x = rng.standard_normal((cols, tokens)).astype(np.float32)
    words = as_uint32(pack_codes(torch.from_numpy(codes), order))
    packed_scales = pack_scales(torch.from_numpy(scales)).numpy()

    y = np.zeros((rows, tokens), np.float32)
    for tile in range(rows // 16):
        total = np.zeros((32, 4), np.float32)
        for group in range(cols // group_size):
            accumulator = np.zeros((32, 4), np.float32)
            for k16 in range(group * group_size // 16, (group + 1) * group_size // 16):
                b = np.zeros((32, 2, 2), np.float32)
                for lane, register, half in np.ndindex(b.shape):
                    k = 16 * k16 + 2 * (lane & 3) + half + 8 * register
                    b[lane, register, half] = x[k, lane >> 2]
                a = registers_of(words[tile, k16 // 4], k16 % 4) - 8
                accumulator = mma_m16n8k16(a, b, accumulator)
            for lane in range(32):
                pair = packed_scales[tile, group, 2 * (lane >> 2) : 2 * (lane >> 2) + 2]
                total[lane] += accumulator[lane] * np.repeat(pair, 2)
        for lane, register in np.ndindex(32, 4):
            y[16 * tile + (lane >> 2) + 8 * (register >> 1), 2 * (lane & 3) + (register & 1)] = total[lane, register]

    weight = (codes.astype(np.float32) - 8) * np.repeat(scales, group_size, axis=1)
    np.testing.assert_allclose(y, weight @ x, rtol=1e-4, atol=1e-3)


def test_default_is_the_pair_order() -> None:
    assert DEFAULT_NIBBLE_ORDER == PAIR and all(name.rpartition("/")[2].isdigit() for name in NIBBLE_ORDERS)


@pytest.mark.parametrize(
    "codes",
    [
        torch.zeros(16, 64, dtype=torch.int32),
        torch.zeros(15, 64, dtype=torch.uint8),
        torch.zeros(16, 32, dtype=torch.uint8),
        torch.full((16, 64), 16, dtype=torch.uint8),
    ],
)
def test_pack_refuses(codes: torch.Tensor) -> None:
    with pytest.raises(ArtifactError, match="expected"):
        pack_codes(codes)


def test_unknown_orders_name_the_known_ones() -> None:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    with pytest.raises(ArtifactError, match="linear/1"):
        pack_codes(codes, "mma/9")
    with pytest.raises(ArtifactError, match="linear/1"):
        unpack_codes(pack_codes(codes), "mma/9")
    with pytest.raises(ArtifactError, match="tile16_pairs/1"):
        pack_scales(torch.zeros(16, 1), "x/1")
    with pytest.raises(ArtifactError, match="expected"):
        unpack_codes(torch.zeros(1, 1, 32, 5, dtype=torch.int32))
    with pytest.raises(ArtifactError, match="expected"):
        unpack_scales(torch.zeros(1, 1, 15))
