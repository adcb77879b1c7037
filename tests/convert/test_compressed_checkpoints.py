"""Checkpoints of compressed-tensors in INT4: kept bit for bit, or dequantized, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fut_convert.errors import CheckpointError, UnsupportedModelError
from fut_convert.sources import open_source
from kept_artifacts import (
    check_codes_and_scales,
    check_kept,
    check_loaded,
    check_requantized,
    converted,
    errors_of,
)
from quantized_checkpoints import (
    Parts,
    Quantized,
    compressed_config,
    compressed_parts,
    matrices_of,
    random_quantized,
    write_quantized,
)

LAYER = "model.layers.0"


@pytest.mark.parametrize(("group", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (32, torch.bfloat16)])
def test_symmetric_codes_are_kept_bit_for_bit(group: int, dtype: torch.dtype, tmp_path: Path) -> None:
    check_kept(tmp_path, group, dtype, compressed_parts, compressed_config(group), "packed:compressed-tensors")


def test_one_scale_a_row_is_kept(tmp_path: Path) -> None:
    config = compressed_config(0, strategy="channel", group_size=None)
    matrices = write_quantized(
        tmp_path / "model", lambda name, shape: matrices_of(shape[1])(name, shape), compressed_parts, config
    )
    check_codes_and_scales(converted(tmp_path / "model", tmp_path / "out"), matrices, "packed:compressed-tensors")


@pytest.mark.parametrize(
    ("reason", "settings", "weights"),
    [
        ("it is asymmetric (zero points other than 8)", {"zeros": "with_zero"}, {"symmetric": False}),
        ("act-order has permuted its columns", {"permuted": True}, {"actorder": "group"}),
        ("act-order has permuted", {"permuted": True, "zeros": "asymmetric"}, {"actorder": "group"}),
    ],
    ids=["asymmetric", "actorder", "both"],
)
def test_what_cannot_be_kept_is_quantized_anew(
    reason: str, settings: dict[str, Any], weights: dict[str, Any], tmp_path: Path
) -> None:
    make, config = matrices_of(64, **settings), compressed_config(64, **weights)
    check_requantized(tmp_path, reason, make, pack=compressed_parts, config=config)


def test_act_order_of_the_weights_alone_changes_nothing(tmp_path: Path) -> None:
    """`actorder: weight` leaves the groups contiguous; older versions write a g_idx of -1 where there is no order."""

    def pack(matrix: Quantized) -> Parts:
        index = torch.full((matrix.codes.shape[1],), -1, dtype=torch.int32)
        return {**compressed_parts(matrix), "weight_g_idx": index}

    matrices = write_quantized(tmp_path / "model", matrices_of(64), pack, compressed_config(64, actorder="weight"))
    check_codes_and_scales(converted(tmp_path / "model", tmp_path / "out"), matrices, "packed:compressed-tensors")


def test_zero_points_of_older_versions(tmp_path: Path) -> None:
    """They were neither packed nor shifted."""

    def pack(matrix: Quantized) -> Parts:
        return {**compressed_parts(matrix), "weight_zero_point": torch.from_numpy((matrix.zeros - 8).astype(np.int8))}

    make = matrices_of(64, zeros="with_zero")
    check_loaded(tmp_path / "model", write_quantized(tmp_path / "model", make, pack, compressed_config(64)))


def test_two_groups_of_the_config_and_a_module_left_out(tmp_path: Path) -> None:
    """MLP in groups of 128, attention of 64, and one matrix ignored: its module alone is quantized anew."""

    def make(name: str, shape: tuple[int, int]) -> Quantized:
        return random_quantized(name, shape, 128 if "mlp" in name else 64)

    def ignore(tensors: dict[str, Tensor]) -> None:
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{LAYER}.self_attn.v_proj.{part}"]
        tensors[f"{LAYER}.self_attn.v_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)

    config = compressed_config(64)
    other = compressed_config(128)["config_groups"]["group_0"]
    config["config_groups"] |= {"group_1": {**other, "targets": ["re:.*mlp.*"]}}
    write_quantized(tmp_path / "model", make, compressed_parts, config, change=ignore)
    artifact = converted(tmp_path / "model", tmp_path / "out")
    weights = artifact.manifest.weights
    assert weights["layers.0.qkv"]["int4"].method == "rtn"
    for name, group in (("layers.1.qkv", 64), ("layers.0.o", 64), ("layers.0.gate_up", 128), ("layers.1.down", 128)):
        spec = weights[name]["int4"]
        assert (spec.method, spec.group_size) == ("packed:compressed-tensors", group)
    with open_source(str(tmp_path / "model")) as source:
        assert "model.layers.0.self_attn.v_proj.weight" not in source.quantized


# --- the library itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", ["symmetric", "with_zero"])
def test_what_the_library_packs_is_read_back(zeros: str, tmp_path: Path) -> None:
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(
        num_bits=4, type="int", symmetric=zeros == "symmetric", strategy="group", group_size=64
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)

    def pack(matrix: Quantized) -> Parts:
        given = {
            "weight": matrix.weight(),
            "weight_scale": matrix.scales.float(),
            "weight_zero_point": torch.from_numpy((matrix.zeros - 8).astype(np.int8)),
        }
        parts = packing.PackedQuantizationCompressor.compress(given, scheme)
        return {**parts, "weight_scale": parts["weight_scale"].to(matrix.scales.dtype)}

    make, config = matrices_of(64, zeros=zeros), compressed_config(64, symmetric=zeros == "symmetric")
    matrices = write_quantized(tmp_path / "model", make, pack, config)
    check_loaded(tmp_path / "model", matrices)
    for matrix in matrices.values():
        ours, theirs = compressed_parts(matrix), pack(matrix)
        assert set(ours) == set(theirs) and all(torch.equal(ours[part], theirs[part]) for part in ours)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed_config(64, num_bits=8), "holds int of 8 bits in the format pack-quantized"),
        ({**compressed_config(64), "format": "marlin-24"}, "holds int of 4 bits in the format marlin-24"),
        (
            compressed_config(64, type="float"),
            "holds float of 4 bits.*readable are int of 4 bits",
        ),
        (compressed_config(64, strategy="tensor"), "strategy is 'tensor', readable are group and channel"),
        ({**compressed_config(64), "sparsity_config": {"format": "sparse-24-bitmask"}}, "the weights are sparse"),
        ({**compressed_config(64), "transform_config": {"config_groups": {"R4": {}}}}, "transform_config rotates"),
        ({"quant_method": "compressed-tensors"}, "holds nothing in the format"),
        (compressed_config(64, type=["int"]), r"holds \['int'\] of 4 bits"),
    ],
)
def test_other_settings_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", matrices_of(64), compressed_parts, config)
    with pytest.raises(UnsupportedModelError, match=message) as error:
        open_source(str(tmp_path / "model"))
    assert "config.json: quantization_config" in str(error.value) and "original checkpoint" in str(error.value)


def test_bits_that_are_no_number_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", matrices_of(64), compressed_parts, compressed_config(64, num_bits=[4]))
    with pytest.raises(CheckpointError, match=r"weights: num_bits is \[4\], expected a positive integer"):
        open_source(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "weight_scale",
            lambda t: t[:, :1],
            "weight_scale has shape [320, 1], expected [320, 2] by the config's",
        ),
        ("weight_scale", lambda t: t[:8], "weight_scale is F16 [8, 2], expected F16 or BF16 or F32 [320, 2]"),
        ("weight_packed", lambda t: t.float(), "weight_packed is F32 [320, 16], expected I32 [320, 16]"),
        ("weight_shape", lambda t: t + 1, "weight_shape says [321, 129], but weight_packed holds [320, 128]"),
        ("weight_zero_point", lambda t: t[:4], "weight_zero_point is I32 [4, 2], expected I32 or I8 [40, 2]"),
        ("weight_g_idx", lambda t: t + 1, "weight_g_idx names groups 1 to 2 of 2"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    part: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    name = f"{LAYER}.mlp.up_proj.{part}"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name]).clone()

    make = matrices_of(64, zeros="asymmetric", permuted=True)
    write_quantized(tmp_path / "model", make, compressed_parts, compressed_config(64), change=spoil)
    found = errors_of(tmp_path / "model")
    assert len(found) == 1 and message in found[0] and f"model.safetensors: {LAYER}.mlp.up_proj" in found[0]
