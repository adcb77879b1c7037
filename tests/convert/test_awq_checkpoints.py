"""Checkpoints of AutoAWQ: dequantized, or kept bit for bit where all zero points are 8; and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fut_convert.errors import UnsupportedModelError
from fut_convert.sources import open_source
from kept_artifacts import (
    check_codes_and_scales,
    check_kept,
    check_loaded,
    check_requantized,
    converted,
    errors_of,
)
from quantized_checkpoints import awq_config, awq_parts, matrices_of, write_quantized

LAYER = "model.layers.0"


@pytest.mark.parametrize(("group", "dtype"), [(64, torch.float16), (128, torch.bfloat16), (32, torch.float16)])
def test_codes_around_8_are_kept_bit_for_bit(group: int, dtype: torch.dtype, tmp_path: Path) -> None:
    check_kept(tmp_path, group, dtype, awq_parts, awq_config(group), "packed:awq")


@pytest.mark.parametrize("zeros", ["asymmetric", "with_zero"])
def test_asymmetric_codes_are_quantized_anew(zeros: str, tmp_path: Path) -> None:
    reason = "it is asymmetric (zero points other than 8)"
    check_requantized(tmp_path, reason, matrices_of(64, zeros=zeros), pack=awq_parts, config=awq_config(64))


def test_groups_of_16_are_quantized_anew(tmp_path: Path) -> None:
    check_requantized(tmp_path, "its groups are of 16", matrices_of(16), pack=awq_parts, config=awq_config(16))


def test_one_group_over_all_inputs(tmp_path: Path) -> None:
    matrices = write_quantized(
        tmp_path / "model", lambda name, shape: matrices_of(shape[1])(name, shape), awq_parts, awq_config(-1)
    )
    check_codes_and_scales(converted(tmp_path / "model", tmp_path / "out"), matrices, "packed:awq")


def test_the_config_may_be_in_autoawqs_own_file(tmp_path: Path) -> None:
    config = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    files = {"quant_config.json": config}
    matrices = write_quantized(tmp_path / "model", matrices_of(64), awq_parts, None, files=files)
    check_loaded(tmp_path / "model", matrices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "gemv"}, "order of AWQ's kernel 'gemv', and only that of gemm can be converted"),
        ({"version": "marlin"}, "order of AWQ's kernel 'marlin'"),
        ({"bits": 8}, "the weights have 8 bits"),
        ({"group_size": "many"}, "group_size is 'many', expected a positive integer"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", matrices_of(64), awq_parts, awq_config(64, **changes))
    with pytest.raises(Exception, match=message) as error:
        open_source(str(tmp_path / "model"))
    assert "config.json: quantization_config" in str(error.value)
    assert isinstance(error.value, UnsupportedModelError) or "group_size" in changes


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qzeros", lambda t: t[:1], "qzeros is I32 [1, 40], expected I32 [2, 40]"),
        ("scales", lambda t: t[:, :8].contiguous(), "scales is F16 [2, 8], expected F16 or BF16 or F32 [2, 320]"),
        ("qweight", lambda t: t.float(), "qweight is F32 [128, 40], expected I32 [128, 40]"),
        ("qweight", lambda t: t[:, :, None], "qweight has shape [128, 40, 1], expected [in, out/8]"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    part: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    name = f"{LAYER}.mlp.up_proj.{part}"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name]).clone()

    write_quantized(tmp_path / "model", matrices_of(64), awq_parts, awq_config(64), change=spoil)
    found = errors_of(tmp_path / "model")
    assert len(found) == 1 and message in found[0] and f"model.safetensors: {LAYER}.mlp.up_proj" in found[0]
