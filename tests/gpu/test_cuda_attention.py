"""Decode attention of the CUDA library against the reference backend on the same card."""

from __future__ import annotations

import pytest
import torch

from attention_setup import Shape, Step, make_step
from fut_runtime.cuda.library import CudaCallError, library
from fut_runtime.reference.kv_quant import quantize_heads
from fut_runtime.reference.numerics import EXACT
from kv_blocks import block_bytes

pytestmark = pytest.mark.usefixtures("built")

#: The contract: relative RMS difference, and codes that agree.
TOLERANCE = 2**-8
EQUAL_CODES = 0.999
CONTEXTS = [1, 63, 64, 65, 127, 1000, 5000, 2, 256, 257]

SHAPES = [
    Shape(32, 8, 128),
    Shape(8, 8, 128),
    Shape(6, 2, 64),
    Shape(8, 2, 80),
    Shape(10, 2, 96),
    Shape(14, 2, 64),
    Shape(16, 2, 128),
    Shape(16, 1, 128),
    Shape(24, 2, 80),
    Shape(12, 1, 96),
    Shape(9, 3, 64, zero_point=False),
    Shape(8, 2, 128, zero_point=False, norms=True),
    Shape(8, 2, 128, rotation=False),
    Shape(8, 2, 80, rotation=False, zero_point=False),
    Shape(8, 2, 96, norms=True),
    Shape(32, 8, 128, bits=16),
    Shape(7, 1, 64, bits=16),
    Shape(8, 2, 80, bits=16, norms=True),
    Shape(5, 1, 96, bits=16),
    Shape(16, 1, 128, bits=16),
]


def difference(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative RMS difference of each row."""
    return (got.float() - expected).norm(dim=-1) / expected.norm(dim=-1)


def check_output(step: Step, got: torch.Tensor) -> None:
    found = difference(got, step.expected())
    assert bool((found <= TOLERANCE).all()), f"relative RMS {found.tolist()} for positions {step.position.tolist()}"


def check_appended(step: Step) -> None:
    s, equal, total = step.shape, 0, 0
    for row in range(len(step.request_of_row)):
        _, k, v = step.heads_of(row)
        codes, scale, zero = step.stored(row)
        for which, x in enumerate((k, v)):
            if s.bits == 16:
                equal += int((codes[which] == x[0].bfloat16()).sum())
            else:
                expected = quantize_heads(EXACT.round16(x), s.spec, s.signs.to(step.device))
                equal += int((codes[which] == expected.codes[0]).sum())
                torch.testing.assert_close(scale[which], expected.scale[0], rtol=2**-7, atol=0)
                torch.testing.assert_close(zero[which], expected.zero[0], rtol=2**-7, atol=0)
            total += x.numel()
    assert equal >= EQUAL_CODES * total, f"{total - equal} of {total} codes differ"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_requests_of_different_lengths(shape: Shape) -> None:
    step = make_step(shape, CONTEXTS)
    before = step.pool.clone()
    out = step.run()
    check_output(step, out)
    check_appended(step)
    # Nothing but the new tokens changed: at most their codes and scale words, and only in this layer.
    changed = (step.pool != before).view(-1, step.layers, shape.kv_heads * block_bytes(shape.bits, shape.head_dim))
    per_token = shape.kv_heads * block_bytes(shape.bits, shape.head_dim) // 64
    assert int(changed[:, step.layer].sum()) <= len(CONTEXTS) * per_token
    assert int(changed.sum()) == int(changed[:, step.layer].sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_of_prompts(shape: Shape) -> None:
    """Several tokens of a request in a launch, from the first on and across pages; a request of one token beside."""
    step = make_step(shape, [10, 70, 300, 129], [10, 20, 1, 2])
    out = step.run(chunked=True)
    check_output(step, out)
    check_appended(step)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[7], SHAPES[15]], ids=str)
def test_a_row_gives_the_same_bits_alone_and_in_company(shape: Shape) -> None:
    contexts = [1, 64, 700, 257, 3000, 9000, 33, 4097]
    step = make_step(shape, contexts)
    before = step.pool.clone()
    together = step.run()
    appended = step.pool.clone()
    assert torch.equal(step.run(), together)
    for row in range(len(contexts)):
        step.pool.copy_(before)
        assert torch.equal(step.run([row])[0], together[row]), contexts[row]
    step.pool.copy_(before)
    assert torch.equal(step.run(chunked=True), together)
    assert torch.equal(step.pool, appended)


def test_the_counters_are_left_zero() -> None:
    step = make_step(SHAPES[0], [5000, 1, 300])
    step.workspace[64 * 32 * 4 :] = 255
    check_output(step, step.run())
    assert int(step.workspace[: 64 * 32 * 4].max()) == 0


@pytest.mark.parametrize("rows", [1, 64])
def test_long_contexts(rows: int) -> None:
    contexts = [131072] if rows == 1 else [1 + 97 * i for i in range(rows)]
    step = make_step(Shape(4, 1, 128), contexts, layers=1, layer=0)
    check_output(step, step.run())


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**9])
def test_values_of_very_different_sizes(size: float) -> None:
    """p times the value's scale is an FP16 operand: its range must follow the values."""
    sizes = size * 2.0 ** torch.linspace(-6, 6, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    step = make_step(Shape(8, 2, 128), [700, 65, 1, 5000], value_sizes=sizes)
    check_output(step, step.run())


@pytest.mark.parametrize("size", [1e-4, 30.0, 3000.0])
def test_queries_of_any_size(size: float) -> None:
    step = make_step(Shape(8, 2, 128), [700, 65, 1, 5000])
    step.qkv[:, : 8 * 128] *= size
    check_output(step, step.run())


def test_growing_scores_raise_the_maximum() -> None:
    """Keys that grow along the context make every unit exceed the maximum of those before."""
    step = make_step(Shape(8, 2, 128, rotation=False), [3000], key_size=3.0)
    check_output(step, step.run())


def test_blocks_past_four_gibibytes() -> None:
    shape, layers = Shape(16, 4, 128), 20
    page = layers * shape.kv_heads * block_bytes(4, 128)
    count = 2**32 // page + 100
    pool = torch.full((count * page,), 255, dtype=torch.uint8, device="cuda")
    pages = torch.arange(count - 1, count - 40, -1, device="cuda")
    step = make_step(shape, [1000, 1, 65], layers=layers, layer=layers - 1, pool=pool, pages=pages)
    assert int(step.page_table[step.slot].amin(1).max()) * page > 2**32
    check_output(step, step.run())
    check_appended(step)


def test_what_is_refused() -> None:
    step = make_step(SHAPES[0], [5])
    step.layer = 3
    with pytest.raises(CudaCallError, match="layer 3 of a cache of 3"):
        step.run()
    step.layer = 1
    step.workspace = step.workspace[: 64 * 32 * 4]
    with pytest.raises(CudaCallError, match="workspace"):
        step.run()
    assert library().fut_kv_block_bytes(4, 128) == 8704
