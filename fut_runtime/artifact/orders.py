"""The orders of INT4 codes and scales inside a tile: names, versions and tables.

A matrix is cut into tiles of 16 rows (m16) by 64 columns; a tile is 32 lanes of four 32-bit words of eight nibbles, so
that a lane fetches its share with one 16-byte load. Sizes are powers of two, so an order is a permutation of the ten
bits that address a code inside its tile: `r3 r2 r1 r0` of the row and `k5 … k0` of the column become five bits of the
lane, two of the word and three of the nibble.

The A fragment of `mma.sync.m16n8k16` with 16-bit operands (PTX ISA, "Matrix fragments for mma.m16n8k16"): lane L with
g = L >> 2 and c = L & 3 holds four 32-bit registers of two elements: register r is row g + 8·(r & 1), columns
2c + 8·(r >> 1) and the next one, the lower column in the lower half.
"""

from __future__ import annotations

from dataclasses import dataclass

from fut_runtime.errors import ArtifactError

#: One INT4 tile: 16 output rows (m16 of the MMA) by 64 inputs, so that a lane's share is one 16-byte load.
TILE_ROWS = 16
TILE_COLS = 64
LANES = 32
WORDS = 4
NIBBLES = 8
ROW_BITS = ("r3", "r2", "r1", "r0")
COL_BITS = ("k5", "k4", "k3", "k2", "k1", "k0")


@dataclass(frozen=True)
class NibbleOrder:
    """An order of the codes inside a tile.

    Attributes:
        name: name and version, as in the manifest.
        lane, word, nibble: the bits of row and column that form each index, most significant first.
        purpose: which kernel arithmetic it serves.
    """

    name: str
    lane: tuple[str, str, str, str, str]
    word: tuple[str, str]
    nibble: tuple[str, str, str]
    purpose: str

    @property
    def bits(self) -> tuple[str, ...]:
        """The ten address bits in stored order, most significant first."""
        return (*self.lane, *self.word, *self.nibble)

    @property
    def has_octets(self) -> bool:
        """Whether packing may treat eight adjacent codes of a row as one integer: nibble bits 1 and 0 are outside."""
        return self.nibble[0] == "k0" and not {"k1", "k2"} & set(self.nibble)

    def element(self, lane: int, word: int, nibble: int) -> tuple[int, int]:
        """Row and column inside the 16x64 tile of the code that a nibble of a lane's word holds."""
        position = (lane * WORDS + word) * NIBBLES + nibble
        row = col = 0
        for weight, bit in zip(range(9, -1, -1), self.bits, strict=True):
            value = (position >> weight & 1) << int(bit[1])
            if bit[0] == "r":
                row |= value
            else:
                col |= value
        return row, col


DEFAULT_NIBBLE_ORDER = "mma_m16n8k16_a_pair/1"
NIBBLE_ORDERS: dict[str, NibbleOrder] = {
    order.name: order
    for order in (
        NibbleOrder(
            name=DEFAULT_NIBBLE_ORDER,
            lane=("r2", "r1", "r0", "k2", "k1"),
            word=("k5", "k3"),
            nibble=("k0", "r3", "k4"),
            purpose="FP16 1024 + q and 1024 + 16q: masks 0x000f000f and 0x00f000f0 give the same register of two "
            "neighbouring k16 tiles, and one shift by 8 serves both",
        ),
        NibbleOrder(
            name="mma_m16n8k16_a/1",
            lane=("r2", "r1", "r0", "k2", "k1"),
            word=("k5", "k4"),
            nibble=("k0", "k3", "r3"),
            purpose="BF16 128 + q: word t is k16 tile t, its nibbles r and r + 4 are the halves of A register r",
        ),
        NibbleOrder(
            name="linear/1",
            lane=("r3", "r2", "r1", "r0", "k5"),
            word=("k4", "k3"),
            nibble=("k2", "k1", "k0"),
            purpose="row-major nibbles of the tile, for other tools",
        ),
    )
}

DEFAULT_SCALE_ORDER = "tile16_pairs/1"
#: Scale order name -> the row of the 16-row tile that each of the 16 positions holds.
SCALE_ORDERS: dict[str, tuple[int, ...]] = {
    DEFAULT_SCALE_ORDER: tuple(position // 2 + 8 * (position % 2) for position in range(TILE_ROWS)),
}


def nibble_order(name: str) -> NibbleOrder:
    """Look up a nibble order by name; ArtifactError names the known ones."""
    try:
        return NIBBLE_ORDERS[name]
    except KeyError:
        raise ArtifactError(f"nibble order {name!r} is unknown; expected one of {sorted(NIBBLE_ORDERS)}") from None


def scale_rows(name: str) -> tuple[int, ...]:
    """Look up a scale order by name; ArtifactError names the known ones."""
    try:
        return SCALE_ORDERS[name]
    except KeyError:
        raise ArtifactError(f"scale order {name!r} is unknown; expected one of {sorted(SCALE_ORDERS)}") from None
