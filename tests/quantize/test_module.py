"""Matrices in blocks: the same bytes however they are cut, and the same as the whole matrix at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fut_convert.quantize import module
from fut_convert.quantize.fp8 import decode_e4m3, quantize_e4m3
from fut_convert.quantize.module import ModuleQuantizer, relative_error
from fut_convert.quantize.rtn import rtn_int4
from fut_convert.quantize.scales import int4_scales
from fut_runtime.artifact.fragment import DEFAULT_NIBBLE_ORDER, DEFAULT_SCALE_ORDER, pack_codes, pack_scales
from fut_runtime.artifact.layout import padded_e4m3_shape, padded_int4_shape
from fut_runtime.artifact.manifest import WeightSpec
from fut_runtime.artifact.rows import to_stored_rows

CPU = torch.device("cpu")
GROUP = 64


def specs(shape: tuple[int, int], paired: bool) -> dict[str, WeightSpec]:
    """E4M3 with the gain folded, INT4 with the gain at run time, BF16."""
    plain = padded_e4m3_shape(shape)
    wide = "interleave1" if paired else "natural"
    return {
        "e4m3": WeightSpec(
            "e4m3", shape, plain, wide, "folded", scale_dtype="float32", method="rtn", scale_method="absmax"
        ),
        "int4": WeightSpec(
            "int4", shape, padded_int4_shape(shape, GROUP, paired), "interleave8" if paired else "natural", "runtime",
            group_size=GROUP, scale_dtype="bfloat16", nibble_order=DEFAULT_NIBBLE_ORDER,
            scale_order=DEFAULT_SCALE_ORDER, method="rtn", scale_method="absmax_7",
        ),
        "bf16": WeightSpec("bf16", shape, plain, wide, "runtime"),
    }  # fmt: skip


def assembled(quantizer: ModuleQuantizer, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The stored tensors, each row written once, and the relative errors."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    squares = []
    for block in reversed(quantizer.blocks()):
        done = quantizer.quantize(block, [weight[start:stop] for start, stop in block.ranges])
        squares.append(done.squares)
        for suffix, part in done.tensors.items():
            parts.setdefault(suffix, []).append(part)
    tensors = {}
    for suffix, found in parts.items():
        found.sort(key=lambda part: part[0])
        ends = [first + len(part) for first, part in found]
        assert [first for first, _ in found] == [0, *ends[:-1]], suffix
        tensors[suffix] = torch.cat([part for _, part in found])
    return tensors, {name: relative_error(s[name] for s in squares) for name in squares[0]}


@pytest.mark.parametrize(
    ("rows", "paired"), [(48, False), (200, False), (7, False), (64, True), (168, True), (10, True)]
)
@pytest.mark.parametrize("cols", [128, 200])
def test_blocks_join_to_the_whole_matrix(rows: int, paired: bool, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_CPU", 32 * cols)
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, cols, generator=generator) * 0.02
    gain = torch.rand(cols, generator=generator) + 0.5
    targets = specs((rows, cols), paired)
    found, errors = assembled(ModuleQuantizer(targets, gain=gain, device=CPU), weight)

    def stored(x: Tensor, name: str) -> Tensor:
        return to_stored_rows(x, targets[name].row_order, targets[name].padded_shape[0])

    def padded(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.pad(x, (0, targets[name].padded_shape[1] - cols))

    codes, scale = quantize_e4m3(padded(weight * gain, "e4m3"))
    assert torch.equal(found["e4m3"].view(torch.uint8), stored(codes.view(torch.uint8), "e4m3"))
    assert torch.equal(found["e4m3_scale"], stored(scale, "e4m3"))
    grouped = padded(weight, "int4")
    scales = int4_scales(grouped, GROUP, "absmax_7")
    int4 = rtn_int4(grouped, scales, GROUP)
    assert torch.equal(found["int4"], pack_codes(stored(int4, "int4")))
    assert torch.equal(found["int4_scale"], pack_scales(stored(scales, "int4")))
    assert torch.equal(found["bf16"], stored(padded(weight.bfloat16(), "bf16"), "bf16"))

    decoded = (int4.double().unflatten(1, (-1, GROUP)) - 8) * scales.double()[..., None]
    lost = torch.linalg.vector_norm(decoded.flatten(1)[:, :cols] - weight.double())
    assert errors["int4"] == pytest.approx(float(lost / torch.linalg.vector_norm(weight.double())), rel=1e-4)
    assert 0.01 < errors["e4m3"] < 0.04 and 0 < errors["bf16"] < 0.003


def test_errors_count_what_calibration_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_CPU", 16 * 128)
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    gain = torch.linspace(0.5, 2, 128)
    moment = torch.linspace(0.1, 3, 128, dtype=torch.float64)
    targets = {"int4": specs((48, 128), False)["int4"]}
    _, errors = assembled(ModuleQuantizer(targets, gain=gain, second_moment=moment, device=CPU), weight)
    scales = int4_scales(weight, GROUP, "absmax_7")
    decoded = ((rtn_int4(weight, scales, GROUP).double().unflatten(1, (-1, GROUP)) - 8) * scales[..., None]).flatten(1)
    seen = moment * gain.double() ** 2
    expected = ((seen * (decoded - weight) ** 2).sum() / (seen * weight.double() ** 2).sum()).sqrt()
    assert errors["int4"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("gain_at", ["runtime", "folded"])
def test_errors_are_weighed_by_what_multiplies_the_stored_weights(gain_at: str) -> None:
    """Calibration gives the moment before the gain; a gain at run time reaches the product as its square."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(32, 128, generator=generator)
    gain = torch.randn(128, generator=generator).exp()
    moment = torch.randn(128, generator=generator).exp().double()
    spec = replace(specs((32, 128), False)["int4"], gain=gain_at, scale_method="weighted_search")
    found, _ = assembled(ModuleQuantizer({"int4": spec}, gain=gain, second_moment=moment, device=CPU), weight)
    stored, seen = (weight, moment * gain.double() ** 2) if gain_at == "runtime" else (weight * gain, moment)
    scales = int4_scales(stored, GROUP, "weighted_search", second_moment=seen.float())
    assert torch.equal(found["int4_scale"], pack_scales(scales))
    assert torch.equal(found["int4"], pack_codes(rtn_int4(stored, scales, GROUP)))
    assert not torch.equal(scales, int4_scales(stored, GROUP, "weighted_search", second_moment=moment.float() * 0 + 1))


def test_modules_without_a_norm_before_them_know_no_gain() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(2))
    moment = torch.linspace(0.1, 5, 128, dtype=torch.float64)
    spec = replace(specs((32, 128), False)["int4"], gain="none", scale_method="weighted_search")
    found, _ = assembled(ModuleQuantizer({"int4": spec}, second_moment=moment, device=CPU), weight)
    scales = int4_scales(weight, GROUP, "weighted_search", second_moment=moment.float())
    assert torch.equal(found["int4_scale"], pack_scales(scales))


def test_a_matrix_without_error_or_weights() -> None:
    for weight in (torch.zeros(16, 128), torch.ones(16, 128)):
        _, errors = assembled(ModuleQuantizer({"e4m3": specs((16, 128), False)["e4m3"]}, device=CPU), weight)
        assert errors["e4m3"] == 0.0


def test_every_e4m3_code_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)[None].expand(3, -1).contiguous()
    scale = torch.tensor([1.0, 0.0131, 2.0**-100])
    assert torch.equal(decode_e4m3(codes, scale), codes.float() * scale[:, None])
