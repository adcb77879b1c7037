"""Decode's matrix products as the kernels compute them, a fiber a thread, against FP64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from fut_runtime.cuda.library import Library
from fut_runtime.cuda.operations import DeviceMatrix
from fut_runtime.cuda.structs import Epilogue
from projection_matrices import BF16_TOLERANCE, FORMATS, STORE_TOLERANCE, activations, matrix, normalized, relative

#: Rows, columns, tokens: fewer units of K than slices, padded rows, columns that fill no unit, two token tiles, and so
#: many activations that a cluster of two or four CTAs shares K out (with five multiprocessors); last, more rounds than
#: the partial sums have slots.
CASES = [
    (48, 64, 1),
    (40, 608, 3),
    (96, 576, 9),
    (64, 1088, 12),
    (32, 2048, 11),
    (48, 4160, 8),
    (32, 1024, 25),
    (496, 64, 2),
    (416, 1024, 10),
]


def project(
    library: Library, stored: DeviceMatrix, x: Tensor, y: Tensor, epilogue: Epilogue, eps: float = -1.0
) -> Tensor:
    struct = stored.struct()
    workspace = torch.full((library.fut_project_workspace_bytes(ctypes.byref(struct), x.shape[0]),), 255).byte()
    library.call(
        "fut_project", ctypes.byref(struct), x.data_ptr(), y.data_ptr(), x.shape[0], epilogue, eps,
        workspace.data_ptr(), workspace.numel(), None,
    )  # fmt: skip
    return y


def stored_floats(library: Library, stored: DeviceMatrix, x: Tensor, eps: float = -1.0) -> Tensor:
    y = torch.full((x.shape[0], stored.spec.shape[0]), torch.nan)
    return project(library, stored, x, y, Epilogue.STORE, eps)


@pytest.mark.parametrize(("rows", "cols", "tokens"), CASES)
@pytest.mark.parametrize(("weight_format", "group"), FORMATS)
def test_products(emulated: Library, weight_format: str, group: int, rows: int, cols: int, tokens: int) -> None:
    bias, gain = torch.randn(rows), torch.rand(cols) * 2
    stored, values = matrix(weight_format, group, rows, cols, seed=tokens, device="cpu", bias=bias, gain=gain)
    x = activations(tokens, cols, seed=tokens, device="cpu")
    plain = stored_floats(emulated, stored, x)
    assert relative(plain, x.double() @ values.T + bias.double()) <= STORE_TOLERANCE
    last = x[-1:].contiguous()
    assert torch.equal(stored_floats(emulated, stored, last)[0], plain[-1]), "not the same bits alone"
    if tokens <= 9:
        expected = normalized(x, gain, 1e-5).double() @ values.T + bias.double()
        assert relative(stored_floats(emulated, stored, x, eps=1e-5), expected) <= STORE_TOLERANCE


@pytest.mark.parametrize(("weight_format", "group"), FORMATS)
def test_swiglu_and_residual(emulated: Library, weight_format: str, group: int) -> None:
    for tokens, channels, cols in ((1, 40, 128), (10, 36, 640)):
        stored, values = matrix(weight_format, group, 2 * channels, cols, seed=tokens, device="cpu", paired=True)
        x = activations(tokens, cols, seed=tokens, device="cpu")
        both = x.double() @ values.T
        expected = torch.nn.functional.silu(both[:, :channels]) * both[:, channels:]
        y = torch.full((tokens, channels), torch.nan).to(torch.bfloat16)
        assert relative(project(emulated, stored, x, y, Epilogue.SWIGLU), expected) <= BF16_TOLERANCE
        stored, values = matrix(weight_format, group, 52, cols, seed=tokens, device="cpu")
        h = torch.randn(tokens, 52).to(torch.bfloat16)
        expected = h.double() + x.double() @ values.T
        assert relative(project(emulated, stored, x, h, Epilogue.RESIDUAL), expected) <= BF16_TOLERANCE


def test_extreme_activations(emulated: Library) -> None:
    stored, values = matrix("int4", 64, 16, 512, seed=2, device="cpu")
    for size in (1e-35, 1e34):
        x = (activations(2, 512, seed=1, device="cpu").float().clamp(-1, 1) * size).to(torch.bfloat16)
        assert relative(stored_floats(emulated, stored, x), x.double() @ values.T) <= STORE_TOLERANCE
