"""Decode's matrix products on the card against FP64, on awkward sizes; and the same bits alone and in company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fut_runtime.artifact.fragment import (
    DEFAULT_NIBBLE_ORDER,
    DEFAULT_SCALE_ORDER,
    dequantize_int4,
    pack_codes,
    pack_scales,
)
from fut_runtime.artifact.layout import padded_e4m3_shape, padded_int4_shape
from fut_runtime.artifact.manifest import WeightSpec
from fut_runtime.artifact.rows import to_stored_rows
from fut_runtime.cuda.library import library
from fut_runtime.cuda.operations import DeviceMatrix, project
from fut_runtime.cuda.structs import Epilogue
from fut_runtime.errors import UnsupportedError

DEVICE = "cuda"
#: Against FP64 sums of the same operands. INT4 codes carry an offset of 1032 that is taken out in FP32.
STORE_TOLERANCE = 3e-4
#: BF16 outputs: half a unit in the last place, over all elements.
BF16_TOLERANCE = 2**-8
FORMATS = [("int4", 32), ("int4", 64), ("int4", 128), ("e4m3", 0), ("bf16", 0)]
#: Rows and columns: whole slices, fewer units of K than slices, padded rows, columns that fill no unit, large K.
SIZES = [(960, 576), (48, 64), (100, 960), (640, 1568), (1024, 14336), (256, 28672)]


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    try:
        library()
    except UnsupportedError as error:
        pytest.skip(str(error))


def matrix(
    weight_format: str, group: int, rows: int, cols: int, *, seed: int, paired: bool = False, **vectors: Tensor
) -> tuple[DeviceMatrix, Tensor]:
    """A random matrix as the artifact would store it, and its values, FP64 [rows, cols] in natural order."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=DEVICE)

    order = "natural" if not paired else "interleave8" if weight_format == "int4" else "interleave1"
    facts: dict[str, object] = {}
    if weight_format == "int4":
        padded = padded_int4_shape((rows, cols), group, paired)
        dtype = torch.float16 if seed % 2 else torch.bfloat16
        codes = (uniform(rows, padded[1]) * 16).to(torch.uint8)
        codes[:, cols:] = 8
        scales = ((uniform(rows, padded[1] // group) - 0.3) * 0.03).to(dtype)
        values = dequantize_int4(codes, scales)[:, :cols].double()
        stored_codes = to_stored_rows(codes, order, padded[0])
        stored_codes[~to_stored_rows(torch.ones(rows, 1, device=DEVICE), order, padded[0]).bool()[:, 0]] = 8
        weight, scale = pack_codes(stored_codes), pack_scales(to_stored_rows(scales, order, padded[0]))
        facts = {"group_size": group, "scale_dtype": str(dtype).removeprefix("torch.")}
        facts |= {"nibble_order": DEFAULT_NIBBLE_ORDER, "scale_order": DEFAULT_SCALE_ORDER}
    else:
        padded = padded_e4m3_shape((rows, cols))
        full = torch.zeros(rows, padded[1], device=DEVICE)
        full[:, :cols] = torch.randn(rows, cols, generator=generator, device=DEVICE)
        if weight_format == "e4m3":
            codes8 = (full * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
            channel = uniform(rows) * 0.01
            values = codes8[:, :cols].double() * channel.double()[:, None]
            weight = to_stored_rows(codes8.view(torch.uint8), order, padded[0]).view(torch.float8_e4m3fn)
            scale = to_stored_rows(channel, order, padded[0])
            facts = {"scale_dtype": "float32"}
        else:
            sixteen = (full * 0.05).to(torch.bfloat16)
            values, weight, scale = sixteen[:, :cols].double(), to_stored_rows(sixteen, order, padded[0]), None
    spec = WeightSpec(weight_format, (rows, cols), padded, order, "none", **facts)  # type: ignore[arg-type]
    return DeviceMatrix(spec, weight, scale, **vectors), values


def activations(tokens: int, cols: int, seed: int) -> Tensor:
    """BF16, of sizes that differ by orders of magnitude from token to token, with an outlier channel."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    x = torch.randn(tokens, cols, generator=generator, device=DEVICE)
    x *= torch.exp(4 * torch.randn(tokens, 1, generator=generator, device=DEVICE))
    x[:, 3] *= 1000
    return x.to(torch.bfloat16)


def normalized(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(torch.bfloat16)


def relative(found: Tensor, expected: Tensor) -> float:
    """The worst token's, so that no large token hides a small one."""
    return float(((found.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize(("rows", "cols"), SIZES)
@pytest.mark.parametrize(("weight_format", "group"), FORMATS)
def test_products_with_bias_and_norm(weight_format: str, group: int, rows: int, cols: int) -> None:
    for tokens in (1, 2, 7, 8, 9, 16, 17, 32, 45, 64):
        bias = torch.randn(rows, device=DEVICE)
        gain = torch.rand(cols, device=DEVICE) * 2
        stored, values = matrix(weight_format, group, rows, cols, seed=tokens, bias=bias, gain=gain)
        x = activations(tokens, cols, seed=tokens)
        plain = project(stored, x)
        assert relative(plain, x.double() @ values.T + bias.double()) <= STORE_TOLERANCE, tokens
        normed = project(stored, x, eps=1e-5)
        expected = normalized(x, gain, 1e-5).double() @ values.T + bias.double()
        assert relative(normed, expected) <= STORE_TOLERANCE, tokens
        for token in {0, tokens // 2, tokens - 1}:
            alone = x[token : token + 1].contiguous()
            assert torch.equal(project(stored, alone)[0], plain[token]), f"token {token} of {tokens}"
            assert torch.equal(project(stored, alone, eps=1e-5)[0], normed[token]), f"token {token} of {tokens}"


@pytest.mark.parametrize(("weight_format", "group"), FORMATS)
def test_swiglu_and_residual(weight_format: str, group: int) -> None:
    for tokens in (1, 5, 12, 32, 40):
        for channels, cols in ((1568, 576), (1536, 960), (4100, 512)):
            gain = torch.rand(cols, device=DEVICE) + 0.5
            stored, values = matrix(weight_format, group, 2 * channels, cols, seed=tokens, paired=True, gain=gain)
            x = activations(tokens, cols, seed=tokens)
            both = normalized(x, gain, 1e-6).double() @ values.T
            expected = torch.nn.functional.silu(both[:, :channels]) * both[:, channels:]
            assert relative(project(stored, x, Epilogue.SWIGLU, eps=1e-6), expected) <= BF16_TOLERANCE
        for rows, cols in ((576, 1536), (4096, 1568), (100, 640)):
            stored, values = matrix(weight_format, group, rows, cols, seed=tokens)
            x = activations(tokens, cols, seed=tokens)
            h = torch.randn(tokens, rows, device=DEVICE).to(torch.bfloat16)
            expected = h.double() + x.double() @ values.T
            assert relative(project(stored, x, Epilogue.RESIDUAL, y=h), expected) <= BF16_TOLERANCE


def test_extreme_activations_neither_overflow_nor_vanish() -> None:
    """FP16 operands hold BF16's range, since each slice of a token comes with a power of two."""
    stored, values = matrix("int4", 64, 64, 1024, seed=2)
    for size in (1e-35, 1e-10, 1e10, 1e34):
        x = (activations(3, 1024, seed=1).float().clamp(-1, 1) * size).to(torch.bfloat16)
        assert relative(project(stored, x), x.double() @ values.T) <= STORE_TOLERANCE, size
    zero = torch.zeros(2, 1024, dtype=torch.bfloat16, device=DEVICE)
    assert not project(stored, zero).any()


def test_repeated_launches_give_the_same_bits() -> None:
    stored, _ = matrix("int4", 128, 1536, 4096, seed=4)
    x = activations(19, 4096, seed=4)
    first = project(stored, x)
    assert all(torch.equal(project(stored, x), first) for _ in range(50))
