"""Attention over contexts of several pieces as the kernel computes it, a fiber a thread, against the reference."""

from __future__ import annotations

import pytest
import torch

from attention_setup import Shape, make_step
from fut_runtime.cuda.library import Library

#: More than one piece, ends of pages and pieces, and a request of one token.
CONTEXTS = [600, 1, 257, 64, 513, 256]
#: With two CTAs each, one has runs of all pieces, of some pieces, and several of them; with forty, a piece each.
MULTIPROCESSORS = [1, 2, 3, 40]


@pytest.mark.parametrize("shape", [Shape(6, 2, 64), Shape(3, 1, 64, bits=16), Shape(12, 1, 80)], ids=str)
def test_runs_of_pieces(emulated: Library, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(shape, CONTEXTS, device="cpu", functions=emulated)
    before = step.pool.clone()
    outputs = []
    for count in MULTIPROCESSORS:
        monkeypatch.setenv("EMULATED_MULTIPROCESSORS", str(count))
        step.pool.copy_(before)
        outputs.append(step.run())
    expected = step.expected()
    difference = (outputs[0].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert bool((difference <= 2**-8).all()), difference.tolist()
    # The bits do not depend on who computes what, and the counters are left zero.
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])
    assert not step.workspace[: 64 * shape.heads * 4].any()
