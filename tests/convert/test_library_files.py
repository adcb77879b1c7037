"""Matrices that the libraries' own code has packed: files of AutoAWQ and GPTQModel, transformers' FP8 blocks.

How the files came about stands in `library_files/make.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fut_convert.sources import open_source
from fut_convert.sources.base import TensorInfo
from fut_convert.sources.quantized_formats import stored_format
from quantized_checkpoints import (
    Parts,
    Quantized,
    awq_config,
    awq_parts,
    gptq_config,
    gptq_parts,
    random_fp8,
    write_quantized,
)
from repository import REPOSITORY

FILES = REPOSITORY / "tests" / "library_files"


def library_file(name: str) -> tuple[Quantized, Parts, dict[str, Any]]:
    """The matrix of a file, what the library made of it, and the archive that its code is from."""
    with safe_open(FILES / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        made_by = json.loads(file.metadata()["made_by"])
    matrix = Quantized(
        tensors.pop("codes").numpy(),
        tensors.pop("true_scales"),
        tensors.pop("zeros").numpy().astype(np.int64),
        tensors.pop("index").numpy(),
    )
    return matrix, tensors, made_by


def loaded(parts: Parts, config: dict[str, Any]) -> Tensor:
    """The matrix that our reader makes of these tensors."""
    stored = stored_format({"quantization_config": config}, lambda _: None, "some")
    assert stored is not None
    names = {torch.int32: "I32", torch.float16: "F16"}
    infos = {
        f"m.{part}": TensorInfo(f"m.{part}", names[t.dtype], tuple(t.shape), t.nbytes, "file")
        for part, t in parts.items()
    }
    (matrix,) = stored.matrices(infos)
    assert stored.shape(matrix)
    return stored.weight(matrix, lambda info: parts[info.name.removeprefix("m.")])


GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}, "desc_act": True, "sym": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "autoawq": ("autoawq-0.2.9.tar.gz", awq_config(32)),
    "gptqmodel-v2": ("gptqmodel-7.7.0.tar.gz", gptq_config(32, checkpoint_format="gptq_v2", **GPTQMODEL)),
    "gptqmodel-v1": ("gptqmodel-7.7.0.tar.gz", gptq_config(32, checkpoint_format="gptq", **GPTQMODEL)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_library_has_packed_is_read(name: str) -> None:
    matrix, parts, made_by = library_file(name)
    archive, config = CASES[name]
    assert made_by["archive"] == archive and len(made_by["sha256"]) == 64
    assert (matrix.zeros == 0).any() and (matrix.zeros != 8).any()
    assert torch.equal(loaded(parts, config), matrix.weight())


@pytest.mark.parametrize("name", CASES)
def test_the_tests_pack_as_the_library_does(name: str) -> None:
    matrix, parts, _ = library_file(name)
    if name == "gptqmodel-v1":
        # It takes 1 from whole words of eight zero points, so that a 0 borrows from the one after it.
        ours = gptq_parts(matrix, version=2)
        ours["qzeros"] = (ours["qzeros"].to(torch.int64) - 0x11111111).to(torch.int32)
        assert not torch.equal(parts["qzeros"], gptq_parts(matrix, version=1)["qzeros"])
    else:
        ours = awq_parts(matrix) if name == "autoawq" else gptq_parts(matrix, version=2)
    assert set(ours) == set(parts) and all(torch.equal(ours[part], parts[part]) for part in ours)


@pytest.mark.parametrize("quantizer", [["gptqmodel:1.4.5"], "gptqmodel:0.9.1", ["other", "gptqmodel:2"]])
def test_whole_words_are_counted_back_where_gptqmodel_wrote_them(quantizer: Any) -> None:
    matrix, parts, _ = library_file("gptqmodel-v1")
    config = gptq_config(32, sym=False, meta={"quantizer": quantizer})
    assert torch.equal(loaded(parts, config), matrix.weight())
    # From any other tool such words are taken nibble by nibble.
    for meta in (None, {}, {"quantizer": []}, {"quantizer": ["intel/auto-round:0.3"]}, "gptqmodel"):
        other = gptq_config(32, sym=False, meta=meta)
        assert torch.equal(loaded(gptq_parts(matrix, version=1), other), matrix.weight())


def test_blocks_of_fp8_are_those_of_transformers(tmp_path: Path) -> None:
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

    def pack(matrix: Any) -> Parts:
        return {
            "weight": torch.from_numpy(matrix.bits).view(torch.float8_e4m3fn),
            "weight_scale_inv": torch.from_numpy(matrix.scales[::128, ::128].copy()),
        }

    sizes: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 384, "layers": 1}
    matrices = write_quantized(
        tmp_path / "model", lambda name, shape: random_fp8(name, shape, (128, 128)), pack, config, **sizes
    )
    theirs = integration.Fp8Dequantize(None)
    with open_source(str(tmp_path / "model")) as source:
        assert len(matrices) == 7
        for name, matrix in matrices.items():
            parts = pack(matrix)
            expected = theirs._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)
            assert torch.equal(source.load(name), expected)
