"""Random matrices as the artifact stores them, and inputs for them, for tests of decode's matrix products."""

from __future__ import annotations

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
from fut_runtime.cuda.operations import DeviceMatrix

#: Against FP64 sums of the same operands. INT4 codes carry an offset of 1032 that is taken out in FP32.
STORE_TOLERANCE = 3e-4
#: BF16 outputs: half a unit in the last place, over all elements.
BF16_TOLERANCE = 2**-8
FORMATS = [("int4", 32), ("int4", 64), ("int4", 128), ("e4m3", 0), ("bf16", 0)]


def matrix(
    weight_format: str,
    group: int,
    rows: int,
    cols: int,
    *,
    seed: int,
    device: str,
    paired: bool = False,
    **vectors: Tensor,
) -> tuple[DeviceMatrix, Tensor]:
    """A random matrix as the artifact would store it, and its values, FP64 [rows, cols] in natural order."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

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
        stored_codes[~to_stored_rows(torch.ones(rows, 1, device=device), order, padded[0]).bool()[:, 0]] = 8
        weight, scale = pack_codes(stored_codes), pack_scales(to_stored_rows(scales, order, padded[0]))
        facts = {"group_size": group, "scale_dtype": str(dtype).removeprefix("torch.")}
        facts |= {"nibble_order": DEFAULT_NIBBLE_ORDER, "scale_order": DEFAULT_SCALE_ORDER}
    else:
        padded = padded_e4m3_shape((rows, cols))
        full = torch.zeros(rows, padded[1], device=device)
        full[:, :cols] = torch.randn(rows, cols, generator=generator, device=device)
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


def activations(tokens: int, cols: int, *, seed: int, device: str) -> Tensor:
    """BF16, of sizes that differ by orders of magnitude from token to token, with an outlier channel."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, cols, generator=generator, device=device)
    x *= torch.exp(4 * torch.randn(tokens, 1, generator=generator, device=device))
    x[:, 3] *= 1000
    return x.to(torch.bfloat16)


def normalized(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(torch.bfloat16)


def relative(found: Tensor, expected: Tensor) -> float:
    """The worst token's, so that no large token hides a small one."""
    return float(((found.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())
