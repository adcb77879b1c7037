"""csrc/decode/kv_block.cuh and attention_work.cuh against their Python twins, compiled with the host's compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kv_blocks import (
    PAGE_TOKENS,
    bf16_elements,
    block_bytes,
    int4_nibbles,
    int4_scale_words,
    pack_bf16,
    pack_int4,
    unpack_bf16,
    unpack_int4,
)

TESTS = Path(__file__).resolve().parent
DIMS = (64, 80, 96, 128)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither CXX, g++ nor clang++")
    program = tmp_path_factory.mktemp("kv_block") / "positions"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    source = TESTS / "kv_block_positions.cpp"
    subprocess.run([compiler, *flags, f"-I{TESTS.parent / 'csrc'}", str(source), "-o", str(program)], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [line.split() for line in output.splitlines()]


def numbers(lines: list[list[str]], kind: str) -> torch.Tensor:
    return torch.tensor([[int(n) for n in line[1:]] for line in lines if line[0] == kind])


def test_sizes(lines: list[list[str]]) -> None:
    for bits, dim, block, asked in numbers(lines, "bytes").tolist():
        assert block == asked == block_bytes(bits, dim)
        assert block % 16 == 0


@pytest.mark.parametrize("dim", DIMS)
def test_places(lines: list[list[str]], dim: int) -> None:
    for kind, places in (("int4", int4_nibbles(dim)), ("bf16", bf16_elements(dim))):
        found = numbers(lines, kind)
        found = found[found[:, 0] == dim]
        assert len(found) == PAGE_TOKENS * dim
        for which in range(2):
            assert torch.equal(places[which][found[:, 1], found[:, 2]], found[:, 3 + which]), (kind, which)
    scales = numbers(lines, "scale")
    scales = scales[scales[:, 0] == dim]
    for which in range(2):
        assert torch.equal(int4_scale_words(dim)[which], scales[:, 2 + which])


def test_two_codes_of_a_byte(lines: list[list[str]]) -> None:
    assert len(numbers(lines, "apart")) == 0


@pytest.mark.parametrize("dim", DIMS)
def test_every_place_is_taken_once_and_no_byte_holds_two_tokens(dim: int) -> None:
    places = torch.stack(int4_nibbles(dim))
    assert torch.equal(places.flatten().sort().values, torch.arange(2 * PAGE_TOKENS * dim))
    owner = torch.full((PAGE_TOKENS * dim,), -1)
    token = torch.arange(2 * PAGE_TOKENS).view(2, PAGE_TOKENS, 1).expand_as(places)
    owner[places.flatten() // 2] = token.flatten()
    assert torch.equal(owner[places // 2], token)
    elements = torch.stack(bf16_elements(dim))
    assert torch.equal(elements.flatten().sort().values, torch.arange(2 * PAGE_TOKENS * dim))


@pytest.mark.parametrize("dim", DIMS)
def test_round_trip(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    codes = tuple(torch.randint(16, (3, PAGE_TOKENS, dim), dtype=torch.uint8, generator=generator) for _ in range(2))
    words = tuple(torch.randint(-(2**31), 2**31, (3, PAGE_TOKENS), generator=generator).int() for _ in range(2))
    blocks = pack_int4(codes, words, dim)  # type: ignore[arg-type]
    assert blocks.shape == (3, block_bytes(4, dim))
    got_codes, got_words = unpack_int4(blocks, dim)
    for which in range(2):
        assert torch.equal(got_codes[which], codes[which]) and torch.equal(got_words[which], words[which])
    keys, values = torch.randn(2, 3, PAGE_TOKENS, dim, generator=generator).bfloat16()
    got = unpack_bf16(pack_bf16(keys, values), dim)
    assert torch.equal(got[0], keys) and torch.equal(got[1], values)


def test_pieces_of_a_context(lines: list[list[str]]) -> None:
    assert len(numbers(lines, "too_many")) == len(numbers(lines, "bad_size")) == 0
    for _, most, bound in numbers(lines, "pieces").tolist():
        assert most == bound
