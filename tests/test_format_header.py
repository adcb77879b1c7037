"""csrc/format.h against the Python tables: every position of every order, compiled with the host's compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fut_runtime.artifact.checks import MATRIX_ALIGN
from fut_runtime.artifact.fragment import pack_codes, pack_scales
from fut_runtime.artifact.layout import SITES
from fut_runtime.artifact.orders import NIBBLE_ORDERS, TILE_COLS, TILE_ROWS
from fut_runtime.artifact.rows import to_stored_rows

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither CXX, g++ nor clang++")
    program = tmp_path_factory.mktemp("format") / "positions"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    command = [compiler, *flags, f"-I{TESTS.parent / 'csrc'}", str(TESTS / "format_positions.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [line.split() for line in output.splitlines()]


def rows_of(lines: list[list[str]], kind: str) -> list[list[str]]:
    return [line[1:] for line in lines if line[0] == kind]


def test_constants(lines: list[list[str]]) -> None:
    assert rows_of(lines, "constants") == [[str(n) for n in (TILE_ROWS, TILE_COLS, 8, MATRIX_ALIGN)]]
    assert rows_of(lines, "sites") == [[str(SITES.index(s)) for s in ("qkv", "o", "gate_up", "down")] + ["4"]]


def test_code_positions(lines: list[list[str]]) -> None:
    assert rows_of(lines, "mismatch") == []
    found = rows_of(lines, "code")
    assert {row[0] for row in found} == set(NIBBLE_ORDERS) and len(found) == 1024 * len(NIBBLE_ORDERS)
    for name, *numbers in found:
        lane, word, nibble, row, col = map(int, numbers)
        assert NIBBLE_ORDERS[name].element(lane, word, nibble) == (row, col)


def test_word_indices(lines: list[list[str]]) -> None:
    """A code of 15 among zeros shows in which word the packing puts it."""
    for name, *numbers in rows_of(lines, "word"):
        row, col, index = map(int, numbers)
        codes = torch.zeros(48, 192, dtype=torch.uint8)
        codes[row, col] = 15
        assert pack_codes(codes, name).flatten().nonzero().flatten().tolist() == [index]


def test_scale_indices(lines: list[list[str]]) -> None:
    packed = pack_scales(torch.arange(48 * 3).view(48, 3)).flatten()
    for numbers in rows_of(lines, "scale"):
        row, group, index = map(int, numbers)
        assert packed[index] == 3 * row + group


def test_interleaved_rows(lines: list[list[str]]) -> None:
    natural = torch.arange(48)
    stored = [to_stored_rows(natural, order, 48).tolist() for order in ("interleave1", "interleave8")]
    for numbers in rows_of(lines, "row"):
        channel, half, one, eight = map(int, numbers)
        assert stored[0][one] == stored[1][eight] == 24 * half + channel
