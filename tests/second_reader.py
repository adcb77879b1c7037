"""A second reader of artifacts, written from docs/artifact.md alone: NumPy, json and hashlib, none of our code.

It is slow and plain on purpose. If it and the package disagree, one of them or the page is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY_TYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<u4", "I8": "i1", "F8_E4M3": "u1"}
#: lane, word and nibble of each order as bits of row and column, most significant first (section INT4).
ORDERS = {
    "mma_m16n8k16_a_pair/1": ("r2 r1 r0 k2 k1", "k5 k3", "k0 r3 k4"),
    "mma_m16n8k16_a/1": ("r2 r1 r0 k2 k1", "k5 k4", "k0 k3 r3"),
    "linear/1": ("r3 r2 r1 r0 k5", "k4 k3", "k2 k1 k0"),
}


class SecondReader:
    """Opens an artifact as the section 'Opening an artifact' says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        marker = json.loads((root / "fut_sealed.json").read_bytes())
        assert marker["format"] == "futransformer" and marker["format_version"] <= 1
        listed = (root / marker["files"]).read_bytes()
        assert hashlib.sha256(listed).hexdigest() == marker["sha256"]
        files = json.loads(listed)
        for name, entry in files["files"].items():
            assert not re.search(r"(^|/)(\.\.?)?(/|$)|[\\:]", name)
            data = (root / name).read_bytes()
            step = files["chunk_bytes"]
            assert len(data) == entry["size"] and hashlib.sha256(data).hexdigest() == entry["sha256"]
            chunks = [data[i : i + step] for i in range(0, len(data), step)]
            assert [hashlib.sha256(chunk).hexdigest() for chunk in chunks] == entry["chunks"]
        self.config: dict[str, Any] = json.loads((root / "fut_config.json").read_bytes())
        self.tensors: dict[str, NDArray[Any]] = {}
        for name in files["files"]:
            if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name):
                self._read_shard(root / name)

    def _read_shard(self, path: Path) -> None:
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        assert start % 4096 == 0
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                dtype = np.dtype(NUMPY_TYPES[entry["dtype"]])
                assert (start + begin) % dtype.itemsize == 0
                raw = np.frombuffer(data[start + begin : start + end], dtype).reshape(entry["shape"])
                self.tensors[name] = bf16(raw) if entry["dtype"] == "BF16" else raw

    def matrix(self, name: str, weight_format: str) -> NDArray[np.float32]:
        """A matrix [out, in] of true shape, natural row order."""
        spec = self.config["weights"][name][weight_format]
        stored = {"bf16": self._bf16, "e4m3": self._e4m3, "int4": self._int4}[weight_format](name, spec)
        assert list(stored.shape) == spec["padded_shape"]
        rows, cols = spec["shape"]
        natural = [self._stored_row(spec, row) for row in range(rows)]
        return stored[natural, :cols]

    def codes(self, words: NDArray[np.uint32], order: str) -> NDArray[np.uint8]:
        """Codes [rows, cols] of INT4 words [rows/16, cols/64, 32, 4]."""
        row_tiles, col_tiles = words.shape[:2]
        codes = np.zeros((16 * row_tiles, 64 * col_tiles), np.uint8)
        for lane, word, nibble in np.ndindex(32, 4, 8):
            row, col = element(order, lane, word, nibble)
            codes[row::16, col::64] = words[:, :, lane, word] >> np.uint32(4 * nibble) & np.uint32(15)
        return codes

    def _bf16(self, name: str, spec: dict[str, Any]) -> NDArray[np.float32]:
        return self.tensors[f"{name}.bf16"]

    def _e4m3(self, name: str, spec: dict[str, Any]) -> NDArray[np.float32]:
        return e4m3(self.tensors[f"{name}.e4m3"]) * self.tensors[f"{name}.e4m3_scale"][:, None]

    def _int4(self, name: str, spec: dict[str, Any]) -> NDArray[np.float32]:
        codes = self.codes(self.tensors[f"{name}.int4"], spec["nibble_order"])
        packed = self.tensors[f"{name}.int4_scale"].astype(np.float32)
        assert spec["scale_order"] == "tile16_pairs/1"
        scales = np.zeros((codes.shape[0], packed.shape[1]), np.float32)
        for j in range(16):
            scales[j // 2 + 8 * (j % 2) :: 16] = packed[:, :, j]
        return (codes.astype(np.float32) - 8) * np.repeat(scales, spec["group_size"], axis=1)

    @staticmethod
    def _stored_row(spec: dict[str, Any], row: int) -> int:
        half, channel = divmod(row, max(1, spec["shape"][0] // 2))
        if spec["row_order"] == "interleave1":
            return 2 * channel + half
        if spec["row_order"] == "interleave8":
            return 16 * (channel // 8) + 8 * half + channel % 8
        assert spec["row_order"] == "natural"
        return row


def element(order: str, lane: int, word: int, nibble: int) -> tuple[int, int]:
    """Row and column in the tile of the code at a lane's word's nibble."""
    values = {"r": 0, "k": 0}
    for index, bits in zip((lane, word, nibble), ORDERS[order], strict=True):
        names = bits.split()
        for place, name in enumerate(reversed(names)):
            values[name[0]] |= (index >> place & 1) << int(name[1])
    return values["r"], values["k"]


def bf16(raw: NDArray[np.uint16]) -> NDArray[np.float32]:
    """BF16 bits as numbers."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def e4m3(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """E4M3 bytes as numbers, from the section E4M3."""
    table = np.zeros(256, np.float32)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        table[code] = np.nan if code & 127 == 127 else -value if code & 128 else value
    return table[raw]


def hadamard(n: int) -> NDArray[np.int8]:
    """Sylvester's matrix, from the section of that name."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)], np.int8)
