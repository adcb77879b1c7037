"""Checkpoints in FP8: compressed-tensors, FBGEMM, AutoFP8 and DeepSeek's blocks, dequantized; and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fut_convert import convert, plan_conversion
from fut_convert.errors import UnsupportedModelError
from fut_convert.sources import open_source
from kept_artifacts import QUICK, check_loaded, check_weights, converted, errors_of, relative
from quantized_checkpoints import E4M3_VALUES, Fp8Matrix, Parts, random_fp8, write_dequantized, write_quantized

LAYER = "model.layers.0"
#: Larger than any matrix of these tests: one scale for all.
WHOLE = 1 << 20

Pack = Callable[[Fp8Matrix], Parts]


def packer(
    rows: int, columns: int, shape: Callable[[Tensor], Tensor], scale: str = "weight_scale",
    dtype: torch.dtype = torch.float32, **more: Tensor,
) -> Pack:  # fmt: skip
    """Packs matrices with a scale for each block, stored in a shape."""

    def pack(matrix: Fp8Matrix) -> Parts:
        scales = torch.from_numpy(matrix.scales[::rows, ::columns].copy())
        weight = torch.from_numpy(matrix.bits).view(torch.float8_e4m3fn)
        return {"weight": weight, scale: shape(scales).to(dtype).clone(), **{k: v.clone() for k, v in more.items()}}

    return pack


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": {"num_bits": 8, "type": "float"}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ONE = torch.ones(1)

#: Name -> config, rows and columns that share a scale, and how they are packed.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int], Pack]] = {
    "compressed_tensor": (compressed("tensor"), (WHOLE, WHOLE), packer(WHOLE, WHOLE, torch.flatten, input_scale=ONE)),
    "compressed_channel": (compressed("channel"), (1, WHOLE), packer(1, WHOLE, lambda s: s, dtype=torch.bfloat16)),
    "compressed_block": (
        compressed("block", block_structure=[64, 128]), (64, 128), packer(64, 128, lambda s: s),
    ),
    "fbgemm": (FBGEMM, (1, WHOLE), packer(1, WHOLE, lambda s: s, input_scale_ub=ONE)),
    "auto_fp8": (AUTO_FP8, (WHOLE, WHOLE), packer(WHOLE, WHOLE, lambda s: s[0, 0], input_scale=torch.tensor(1.0))),
    "deepseek": (DEEPSEEK, (128, 128), packer(128, 128, lambda s: s, "weight_scale_inv")),
    "deepseek_bf16": (DEEPSEEK, (128, 128), packer(128, 128, lambda s: s, "weight_scale_inv", torch.bfloat16)),
}  # fmt: skip
#: Rows and columns that are no multiples of 128, so that blocks at the edges are cut.
SIZES: dict[str, Any] = {"hidden": 192, "heads": 3, "kv_heads": 1, "intermediate": 288}


def write(path: Path, kind: str, change: Callable[[dict[str, Tensor]], None] | None = None) -> dict[str, Fp8Matrix]:
    config, block, pack = KINDS[kind]
    return write_quantized(
        path, lambda name, shape: random_fp8(name, shape, block), pack, config, change=change, **SIZES
    )


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_dequantized_and_quantized_by_the_recipe(kind: str, tmp_path: Path) -> None:
    matrices = write(tmp_path / "model", kind)
    check_loaded(tmp_path / "model", matrices)
    plan = plan_conversion(str(tmp_path / "model"), tmp_path / "out", overrides=QUICK)
    assert plan.notes == (
        "the checkpoint holds 14 matrices in FP8; all but kept codes is made of their dequantized values",
    )
    assert not any("anew" in warning for warning in plan.warnings)
    # It brings no codes to refuse the requantizing of.
    artifact = converted(tmp_path / "model", tmp_path / "out", int4__requantize="never")
    check_weights(artifact, matrices, exact=False)
    assert artifact.manifest.weights["layers.0.o"]["int4"].method == "rtn"


def test_the_artifact_is_that_of_the_dequantized_checkpoint(tmp_path: Path) -> None:
    matrices = write(tmp_path / "model", "deepseek")
    plain = write_dequantized(tmp_path / "plain", matrices, **SIZES)
    ours, expected = converted(tmp_path / "model", tmp_path / "ours"), converted(plain, tmp_path / "expected")
    for name in ("layers.0.qkv.e4m3", "layers.1.down.e4m3_scale", "layers.1.gate_up.int4", "layers.0.o.int4_scale"):
        assert torch.equal(ours.tensor(name).view(torch.uint8), expected.tensor(name).view(torch.uint8))


def test_blocks_may_be_larger_than_any_matrix(tmp_path: Path) -> None:
    config = {**DEEPSEEK, "weight_block_size": [1 << 62, 1 << 62]}
    pack = packer(WHOLE, WHOLE, lambda s: s, "weight_scale_inv")
    matrices = write_quantized(
        tmp_path / "model", lambda name, shape: random_fp8(name, shape, (WHOLE, WHOLE)), pack, config, **SIZES
    )
    check_loaded(tmp_path / "model", matrices)


def test_codes_with_a_scale_a_row_come_back_as_they_were(tmp_path: Path) -> None:
    """Where no gain is folded, and a row's largest number is 448, E4M3 of the artifact is E4M3 of the checkpoint."""

    def make(name: str, shape: tuple[int, int]) -> Fp8Matrix:
        matrix = random_fp8(name, shape, (1, WHOLE))
        matrix.bits[:, 0] = 0x7E
        return matrix

    config, _, pack = KINDS["fbgemm"]
    matrices = write_quantized(tmp_path / "model", make, pack, config, **SIZES)
    artifact = converted(tmp_path / "model", tmp_path / "out")
    found = artifact.dequantized("layers.0.o", "e4m3")
    assert relative(found, matrices[f"{LAYER}.self_attn.o_proj.weight"].weight()) < 1e-6


def test_scales_of_an_fp8_cache_are_ignored(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= {f"{LAYER}.self_attn.{which}_scale": torch.ones(1) for which in "kv"}

    write(tmp_path / "model", "auto_fp8", add)
    assert errors_of(tmp_path / "model") == []


def test_the_tests_know_e4m3() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    theirs = bits.view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.from_numpy(E4M3_VALUES).nan_to_num(1e9), theirs.nan_to_num(1e9))


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_the_library_dequantizes_to_the_same(strategy: str, tmp_path: Path) -> None:
    naive = pytest.importorskip("compressed_tensors.compressors.naive_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    matrices = write(tmp_path / "model", f"compressed_{strategy}")
    with open_source(str(tmp_path / "model")) as source:
        for name, matrix in matrices.items():
            parts = KINDS[f"compressed_{strategy}"][2](matrix)
            parts["weight_scale"] = parts["weight_scale"].float()
            theirs = naive.FloatQuantizationCompressor.decompress(parts, scheme)["weight"]
            assert torch.equal(source.load(name), theirs.float())


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**DEEPSEEK, "fmt": "e5m2"}, "FP8 of the kind 'e5m2', readable is e4m3"),
        ({**DEEPSEEK, "weight_block_size": [128]}, r"weight_block_size is \[128\], expected a list of two"),
        (compressed("tensor", symmetric=False), "the FP8 weights are asymmetric"),
        (compressed("tensor_group"), "strategy is 'tensor_group', readable are tensor, channel and block"),
        ({**compressed("tensor"), "format": "nvfp4-pack-quantized"}, "float of 8 bits in the format nvfp4"),
    ],
)
def test_other_settings_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, block, pack = KINDS["deepseek"]
    write_quantized(tmp_path / "model", lambda name, shape: random_fp8(name, shape, block), pack, config)
    with pytest.raises(Exception, match=message) as error:
        open_source(str(tmp_path / "model"))
    assert isinstance(error.value, UnsupportedModelError) or "weight_block_size" in message


@pytest.mark.parametrize(
    ("kind", "part", "change", "message"),
    [
        ("deepseek", "weight_scale_inv", lambda t: t[:1], "is F32 [1, 2], expected F32 or BF16 or F16 [3, 2]"),
        ("fbgemm", "weight_scale", lambda t: t[:5], "is F32 [5, 1], expected F32 or BF16 or F16 [288, 1]"),
        ("fbgemm", "weight", lambda t: t.float().to(torch.float8_e5m2), "is F8_E5M2 [288, 192], expected F8_E4M3"),
        ("fbgemm", "weight", lambda t: t.float(), "is F32 [288, 192], expected F8_E4M3 [288, 192]"),
        ("fbgemm", "weight_scale", None, "weight is FP8 and has no weight_scale"),
        ("fbgemm", "weight", None, "but weight of a matrix in FP8 is missing"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    kind: str, part: str, change: Callable[[Tensor], Tensor] | None, message: str, tmp_path: Path
) -> None:
    name = f"{LAYER}.mlp.up_proj.{part}"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor).clone()

    write(tmp_path / "model", kind, spoil)
    found = errors_of(tmp_path / "model")
    assert len(found) == 1 and message in found[0] and f"model.safetensors: {LAYER}.mlp.up_proj" in found[0]


@pytest.mark.parametrize(
    ("part", "message"),
    [("weight", "weight holds 1 values that are not finite"), ("weight_scale", "weight_scale holds 1")],
)
def test_values_that_are_not_finite_are_found_when_they_are_read(part: str, message: str, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensor = tensors[f"model.layers.1.mlp.down_proj.{part}"]
        tensor[3, 0] = float("nan")

    write(tmp_path / "model", "fbgemm", spoil)
    with pytest.raises(Exception, match=message):
        convert(str(tmp_path / "model"), tmp_path / "out", overrides=QUICK, report=False)
    assert not (tmp_path / "out").exists()
