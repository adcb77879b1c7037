"""What conversions store, against slow NumPy twins that know nothing of how the converter computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from fut_convert import convert
from fut_runtime.artifact.reader import Artifact

Make = Callable[..., Path]
Matrix = NDArray[np.float32]
QUICK = {"calibration.windows": 1, "calibration.window_tokens": 32, "calibration.allow_few_tokens": True}
#: Sizes that need padding everywhere: 136 and 100 are multiples of neither 16 nor 32.
SIZES = {"hidden": 136, "intermediate": 100, "layers": 1, "heads": 2, "kv_heads": 1}
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
NORMS = {"qkv": "layers.0.input_layernorm", "gate_up": "layers.0.post_attention_layernorm", "head": "norm"}


def weights_and_gains(checkpoint: Path) -> dict[str, tuple[Matrix, Matrix | None]]:
    """By name in the artifact: stacked FP32 weights [out, in], and the gain [in] of the norm before."""
    tensors = {name: t.float().numpy() for name, t in load_file(checkpoint / "model.safetensors").items()}
    found = {
        f"layers.0.{module}": np.concatenate([tensors[f"model.layers.0.{part}.weight"] for part in parts])
        for module, parts in PARTS.items()
    }
    found["head"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    gains = {name: NORMS.get(name.split(".")[-1]) for name in found}
    return {n: (w, None if (g := gains[n]) is None else tensors[f"model.{g}.weight"]) for n, w in found.items()}


def bfloat16(x: Matrix) -> Matrix:
    """Nearest BF16 value, ties to even, by its bits."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def float16(x: Matrix) -> Matrix:
    return x.astype(np.float16).astype(np.float32)


ROUND = {"bfloat16": bfloat16, "float16": float16}


def e4m3_twin(weight: Matrix) -> Matrix:
    """Rows scaled so that their maximum is 448, rounded to E4M3 (ties to even), and scaled back."""
    magnitudes = np.array(
        [m / 8 * 2.0**-6 for m in range(8)]
        + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)],
        dtype=np.float32,
    )
    result = np.zeros_like(weight)
    for i, row in enumerate(weight):
        scale = np.float32(np.abs(row).max()) / np.float32(448)
        for j, value in enumerate(row):
            x = np.float32(value) / scale
            distance = np.abs(magnitudes.astype(np.float64) - abs(float(x)))
            nearest = np.flatnonzero(distance == distance.min())
            code = next(int(c) for c in nearest if len(nearest) == 1 or c % 2 == 0)
            result[i, j] = np.copysign(magnitudes[code], x) * scale
    return result


def int4_twin(weight: Matrix, scales: Matrix, group: int) -> tuple[NDArray[np.uint8], Matrix]:
    """Nearest codes for given scales (ties to even), and the decoded weights; `scales` covers padding columns too."""
    rows, cols = weight.shape
    codes = np.full((rows, scales.shape[1] * group), 8, np.uint8)
    decoded = np.zeros_like(weight)
    for i in range(rows):
        for j in range(cols):
            scale = scales[i, j // group]
            q = 0 if scale == 0 else min(7, max(-8, int(np.rint(weight[i, j] / scale))))
            codes[i, j] = q + 8
            decoded[i, j] = np.float32(q) * scale
    return codes, decoded


def absmax_twin(weight: Matrix, group: int, divisor: float, count: int, dtype: str) -> Matrix:
    """Absolute maximum of each group over the divisor, in the scales' type; groups of padding have scale 0."""
    scales = np.zeros((len(weight), count), np.float32)
    for i, row in enumerate(weight):
        for g in range(count):
            part = np.abs(row[g * group : (g + 1) * group])
            scales[i, g] = (part.max() if part.size else np.float32(0)) / np.float32(divisor)
    return ROUND[dtype](scales)


def converted(checkpoint: Path, out: Path, **overrides: Any) -> Artifact:
    convert(str(checkpoint), out, overrides={**QUICK, **{k.replace("__", "."): v for k, v in overrides.items()}})
    return Artifact.open(out)


def numpy(x: torch.Tensor) -> Matrix:
    return x.float().numpy()


@pytest.mark.parametrize(
    ("method", "dtype", "gain", "group", "order", "head"),
    [
        ("absmax_7", "bfloat16", "runtime", "auto", "mma_m16n8k16_a_pair/1", "int4"),
        ("absmax_7.5", "float16", "folded", 32, "mma_m16n8k16_a/1", "int4"),
        ("absmax_7", "float16", "folded", 128, "linear/1", "e4m3"),
    ],
)
def test_codes_and_scales_are_those_of_the_twin(
    method: str, dtype: str, gain: str, group: int | str, order: str, head: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(**SIZES)
    artifact = converted(
        checkpoint, tmp_path / "out", head=head, int4__scale_method=method, int4__scale_dtype=dtype, int4__gain=gain,
        int4__group_size=group, int4__nibble_order=order,
    )  # fmt: skip
    for name, (weight, norm_gain) in weights_and_gains(checkpoint).items():
        if name == "head" and head != "int4":
            continue
        spec = artifact.manifest.weights[name]["int4"]
        assert spec.group_size is not None
        expected = weight if gain == "runtime" or norm_gain is None else weight * norm_gain
        codes, scales = artifact.codes_and_scales(name)
        count = spec.padded_shape[1] // spec.group_size
        scales_twin = absmax_twin(expected, spec.group_size, float(method.split("_")[1]), count, dtype)
        codes_twin, decoded = int4_twin(expected, scales_twin, spec.group_size)
        assert np.array_equal(numpy(scales), scales_twin), name
        assert np.array_equal(codes.numpy(), codes_twin), name
        assert np.array_equal(numpy(artifact.dequantized(name, "int4")), decoded), name


@pytest.mark.parametrize("method", ["search", "weighted_search"])
@pytest.mark.parametrize("gain", ["runtime", "folded"])
def test_searched_scales_come_with_the_codes_nearest_to_the_weights(
    method: str, gain: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(**SIZES)
    artifact = converted(checkpoint, tmp_path / "out", int4__scale_method=method, int4__gain=gain)
    for name, (weight, norm_gain) in weights_and_gains(checkpoint).items():
        if name == "head":
            continue
        group = artifact.manifest.weights[name]["int4"].group_size
        assert group is not None
        expected = weight if gain == "runtime" or norm_gain is None else weight * norm_gain
        codes, scales = artifact.codes_and_scales(name)
        codes_twin, _ = int4_twin(expected, numpy(scales), group)
        assert np.array_equal(codes.numpy(), codes_twin), name
        assert (scales < 0).any() and (scales > 0).any()


def test_e4m3_and_bf16_are_those_of_the_twin(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(**{**SIZES, "hidden": 72, "intermediate": 40}, dtype=torch.float32)
    artifact = converted(checkpoint, tmp_path / "out", head="e4m3", weights=["e4m3", "bf16"])
    for name, (weight, gain) in weights_and_gains(checkpoint).items():
        folded = weight if gain is None else weight * gain
        assert np.array_equal(numpy(artifact.dequantized(name, "e4m3")), e4m3_twin(folded)), name
        if name != "head":
            assert np.array_equal(numpy(artifact.dequantized(name, "bf16")), bfloat16(weight)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_quantized_from_their_own_values(
    dtype: torch.dtype, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(**SIZES, dtype=dtype, tied=True)
    artifact = converted(checkpoint, tmp_path / "out", int4__scale_method="absmax_7", head="int4")
    weights = weights_and_gains(checkpoint)
    assert np.array_equal(numpy(artifact.tensor("embed")), bfloat16(weights["head"][0]))
    for name in ("layers.0.down", "head"):
        weight, group = weights[name][0], artifact.manifest.weights[name]["int4"].group_size
        assert group is not None
        codes, scales = artifact.codes_and_scales(name)
        assert np.array_equal(codes.numpy(), int4_twin(weight, numpy(scales), group)[0])
