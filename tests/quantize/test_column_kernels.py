"""The Triton kernels in Triton's interpreter on the CPU, against the loops in PyTorch; the inverse in place."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from fut_convert.quantize import columns, triangular
from fut_convert.quantize.columns import column_kernels
from repository import REPOSITORY

#: Both solvers of whole matrices with and without the kernels, in a process whose Triton interprets.
COMPARISON = """
import sys, torch
sys.path.insert(0, "tests")
from gptq_matrices import correlated_hessian, random_weight
from fut_convert.quantize import column_kernels, columns, gptq, refine
from fut_convert.quantize.scales import int4_scales

columns_in, rows, group, block_size, order = map(int, sys.argv[1:])
hessian = correlated_hessian(columns_in, 1)
weight = random_weight(rows, columns_in, 2)
weight[:, :group] = 0
scales = int4_scales(weight, group, "search")
scales[1] *= -1
settings = gptq.GptqSettings(act_order=bool(order), block_size=block_size, sweeps=2)
loops = gptq.gptq_int4(weight, hessian, scales, group, settings)
calls = []
def counted(name):
    function = getattr(column_kernels, name)
    setattr(column_kernels, name, lambda *a: (calls.append(name), function(*a)))
counted("gptq_block"), counted("descent_block")
columns.column_kernels = refine.column_kernels = lambda device: column_kernels
kernels = gptq.gptq_int4(weight, hessian, scales, group, settings)
blocks = -(-columns_in // block_size)
assert calls.count("gptq_block") == blocks and calls.count("descent_block") == 2 * blocks, calls
differing = int((loops.codes != kernels.codes).any(dim=1).sum())
assert differing <= 1, differing
assert abs(kernels.weighted_error / loops.weighted_error - 1) < 1e-3
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("columns_in", "rows", "group", "block_size", "act_order"),
    [(192, 40, 64, 128, True), (192, 33, 32, 128, False), (96, 7, 32, 24, True)],
)
def test_kernels_choose_what_the_loops_choose(
    columns_in: int, rows: int, group: int, block_size: int, act_order: bool
) -> None:
    arguments = [str(int(a)) for a in (columns_in, rows, group, block_size, act_order)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPARISON, *arguments]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cpu_runs_the_loops() -> None:
    assert column_kernels(torch.device("cpu")) is None


def test_where_triton_fails_the_loops_run_and_a_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    columns._working_kernels.cache_clear()
    # No module of this name can be imported then, Triton or not.
    monkeypatch.setitem(sys.modules, "fut_convert.quantize.column_kernels", None)
    monkeypatch.delattr("fut_convert.quantize.column_kernels", raising=False)
    with pytest.warns(RuntimeWarning, match="Triton does not run here"):
        assert columns._working_kernels(torch.device("cuda")) is None
    columns._working_kernels.cache_clear()


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 200])
def test_a_triangular_matrix_is_inverted_in_place(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangular, "_LEAF", 16)
    generator = torch.Generator().manual_seed(size)
    lower = torch.randn(size, size, dtype=torch.float64, generator=generator).tril()
    lower.diagonal().abs_().add_(size**0.5)
    inverse = lower.clone()
    triangular.invert_lower(inverse)
    assert torch.allclose(inverse @ lower, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.equal(inverse, inverse.tril())
