"""Attention over contexts of several pieces as the kernel computes it, a fiber a thread, against the reference."""

from __future__ import annotations

import pytest
import torch

from attention_setup import Functions, Shape, make_step
from emulation.conftest import EmulatedLibrary

#: More than one piece, ends of pages and pieces, and a request of one token.
CONTEXTS = [600, 1, 257, 64, 513, 256]
#: With two CTAs each, one has runs of all pieces, of some pieces, and several of them; with forty, a piece each.
MULTIPROCESSORS = [1, 2, 3, 40]


@pytest.mark.parametrize("shape", [Shape(6, 2, 64), Shape(3, 1, 64, bits=16), Shape(12, 1, 80)], ids=str)
def test_runs_of_pieces(emulated: EmulatedLibrary, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    call: Functions = {
        name: getattr(emulated, name) for name in ("fut_attention", "fut_attention_workspace_bytes", "fut_last_error")
    }
    step = make_step(shape, CONTEXTS, device="cpu", call=call)
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
