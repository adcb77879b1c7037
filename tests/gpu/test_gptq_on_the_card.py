"""GPTQ's column kernels on the card against the loops in PyTorch."""

from __future__ import annotations

import pytest
import torch

from fut_convert.quantize import columns, refine
from fut_convert.quantize.gptq import GptqSettings, gptq_int4
from fut_convert.quantize.scales import int4_scales
from gptq_matrices import correlated_hessian, random_weight

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("columns_in", "rows", "group"), [(1024, 300, 128), (608, 96, 32)])
def test_kernels_choose_what_the_loops_choose(
    columns_in: int, rows: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hessian = correlated_hessian(columns_in, 1).float().to(CUDA)
    weight = random_weight(rows, columns_in, 2).to(CUDA)
    scales = int4_scales(weight, group, "weighted_search", second_moment=hessian.diagonal())
    settings = GptqSettings(sweeps=2)
    assert columns.column_kernels(CUDA) is not None, "Triton does not run here"
    kernels, again = (gptq_int4(weight, hessian, scales, group, settings) for _ in range(2))
    assert torch.equal(kernels.codes, again.codes)
    for module in (columns, refine):
        monkeypatch.setattr(module, "column_kernels", lambda _: None)
    loops = gptq_int4(weight, hessian, scales, group, settings)
    assert (kernels.codes != loops.codes).any(dim=1).float().mean() < 0.05
    assert kernels.weighted_error == pytest.approx(loops.weighted_error, rel=1e-3)
