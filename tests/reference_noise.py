"""How far two right implementations of the same arithmetic may come apart over a whole model.

Everything is rounded to BF16 between operations. Sums in another order, or the pieces of an attention, change some of
these roundings by one unit; in the next layer that moves some codes of an INT4 cache to their neighbours, each by a
fifteenth of a head's range. So a model's logits are held against what such changes do to the reference itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fut_runtime.reference.backend import ReferenceBackend
from fut_runtime.reference.model import ReferenceModel
from fut_runtime.reference.projection import Projection
from fut_runtime.rope import rope_tables

#: One unit in the last place of BF16, relative to the number, at most.
UNIT = 2**-8
#: Hopper's tensor cores align E4M3 products, and what they add them to, with the largest, and keep about so many bits
#: behind its first: with 13 the sums' error would be three quarters of what an H200 shows, with 12 it is half as much
#: again (docs/numerics.md: 4.1e-3 over 14336 products).
SUM_BITS = 12
#: Products that are added in one step.
_SUMMED_AT_ONCE = 32
#: Products held at once, for memory.
_MOST_PRODUCTS = 2**28
#: How many times the reference's own noise an implementation may be away from it.
NOISE_MARGIN = 2.0


def forward(model: ReferenceModel, ids: Sequence[int], jitter: float = 0.0) -> Tensor:
    """Residual stream [tokens, hidden] of the decode path; `jitter` is a relative noise on what leaves each layer."""
    generator = torch.Generator().manual_seed(7)
    cache = model.new_cache(len(ids))
    rope = rope_tables(model.spec, torch.arange(len(ids), device=model.device), model.planned_tokens)
    h = model.embed[torch.tensor(ids, device=model.device)].to(model.numerics.dtype)
    for layer in range(model.spec.num_layers):
        h = model.forward_layer(cache, layer, h, rope, "decode")
        noise = torch.rand(h.shape, generator=generator).to(h.device, h.dtype) * 2 - 1
        h = model.numerics.round16(h * (1 + jitter * noise))
    return h


@torch.inference_mode()
def logits_and_noise(backend: ReferenceBackend, ids: Sequence[int]) -> tuple[Tensor, float]:
    """Logits after every token, FP64 [tokens, vocab], and their RMS difference with up to one unit of noise a layer."""
    model = backend.model
    exact, shaken = (model.logits(forward(model, ids, jitter)).double() for jitter in (0.0, UNIT))
    return exact, (shaken - exact).square().mean().sqrt().item()


@contextmanager
def shaken_layers(tensor_cores: bool = False) -> Iterator[None]:
    """As long as this is in force, whatever leaves a layer of the reference has up to one unit of noise.

    With `tensor_cores`, sums of E4M3 products are cut off as well, as Hopper cuts them off. A sum that is off by a
    thousandth moves one code of E4M3 in sixty to its neighbour, a twelfth away.
    """
    generator = torch.Generator().manual_seed(7)
    exact = ReferenceModel.forward_layer

    def shaken(self: ReferenceModel, *arguments: object) -> Tensor:
        h = exact(self, *arguments)  # type: ignore[arg-type]
        noise = torch.rand(h.shape, generator=generator).to(h.device, h.dtype) * 2 - 1
        return self.numerics.round16(h * (1 + UNIT * noise))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceModel, "forward_layer", shaken)
        if tensor_cores:
            exact_sums = Projection.accumulate
            patch.setattr(Projection, "__call__", lambda self, x: self.finish(exact_sums(self, x)))
            patch.setattr(Projection, "accumulate", cut_off_sums)
        yield


def cut_off_sums(projection: Projection, x: Tensor) -> Tensor:
    """Products of E4M3 values [tokens, in] with a projection, summed with few bits: [tokens, out] in x's dtype."""
    weight = projection.matrix().to(x.dtype)
    rows = max(1, _MOST_PRODUCTS // (_SUMMED_AT_ONCE * weight.shape[0]))
    return torch.cat([_cut_off_sums(part, weight) for part in x.split(rows)])


def _cut_off_sums(x: Tensor, weight: Tensor) -> Tensor:
    total = x.new_zeros(len(x), len(weight))
    for a, b in zip(x.split(_SUMMED_AT_ONCE, dim=1), weight.split(_SUMMED_AT_ONCE, dim=1), strict=True):
        products = a[:, None] * b
        largest = torch.maximum(products.abs().amax(-1), total.abs())
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - SUM_BITS)
        total = (total / unit).trunc() * unit + ((products / unit[..., None]).trunc()).sum(-1) * unit
    return total
