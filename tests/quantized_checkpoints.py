"""Checkpoints that are quantized already, written from the definitions of their formats, in plain NumPy.

Every projection of a synthetic checkpoint becomes random codes, scales and zero points; a packer of one of the formats
turns those into tensors. What they stand for is known from before the packing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from synthetic_checkpoint import CheckpointShape, write_checkpoint


@dataclass(frozen=True)
class Quantized:
    """A matrix: weight[n, k] = (codes[n, k] - zeros[n, g]) · scales[n, g] with g = index[k].

    Attributes:
        codes: [out, in], 0..15.
        scales: [out, groups], in the type of the checkpoint.
        zeros: [out, groups], 0..15.
        index: [in], the group of each column.
    """

    codes: np.ndarray
    scales: Tensor
    zeros: np.ndarray
    index: np.ndarray

    def weight(self) -> Tensor:
        """float32 [out, in]; exact."""
        levels = self.codes.astype(np.float32) - self.zeros[:, self.index].astype(np.float32)
        return torch.from_numpy(levels * self.scales.float().numpy()[:, self.index])


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix of E4M3 numbers: bits uint8 [out, in], and FP32 scales [out, in], those of blocks repeated."""

    bits: np.ndarray
    scales: np.ndarray

    def weight(self) -> Tensor:
        """float32 [out, in]."""
        return torch.from_numpy(E4M3_VALUES[self.bits] * self.scales)


def _e4m3(bits: int) -> float:
    """The number that eight bits mean: sign, exponent with bias 7, three bits of mantissa."""
    sign, exponent, mantissa = -1 if bits & 128 else 1, bits >> 3 & 15, bits & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


#: The numbers of all 256 codes.
E4M3_VALUES = np.array([_e4m3(bits) for bits in range(256)], np.float32)

#: Tensors of one module, by the last part of their names.
Parts = dict[str, Tensor]
M = TypeVar("M", Quantized, Fp8Matrix)
#: Of the matrices that were made.
Packer = Callable[[Any], Parts]


def random_quantized(
    name: str,
    shape: tuple[int, int],
    group: int,
    *,
    zeros: str = "symmetric",
    permuted: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Quantized:
    """A matrix with entries near N(0, 1/in).

    Args:
        group: columns a group; the last may have fewer.
        zeros: `symmetric` (8 everywhere), `asymmetric` (1..15), or `with_zero` (0..15, with a 0 in every group).
        permuted: spread the columns over the groups as act-order without static groups does.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    rows, cols = shape
    groups = -(-cols // group)
    codes = np.clip(np.rint(rng.standard_normal(shape) * 3 + 8), 0, 15).astype(np.uint8)
    scales = torch.from_numpy((rng.uniform(0.5, 1.5, (rows, groups)) / 3 / np.sqrt(cols)).astype(np.float32))
    zero_points = np.full((rows, groups), 8)
    if zeros != "symmetric":
        zero_points = rng.integers(1, 16, (rows, groups))
    if zeros == "with_zero":
        zero_points[::4] = 0
    index = np.arange(cols) // group
    if permuted:
        index = index[rng.permutation(cols)]
    return Quantized(codes, scales.to(scale_dtype), zero_points, index)


def matrices_of(group: int, **settings: Any) -> Callable[[str, tuple[int, int]], Quantized]:
    """Makes matrices for `write_quantized`; settings are those of `random_quantized`."""
    return lambda name, shape: random_quantized(name, shape, group, **settings)


def random_fp8(name: str, shape: tuple[int, int], block: tuple[int, int]) -> Fp8Matrix:
    """A matrix with entries near N(0, 1/in), and a BF16 scale for every `block` (rows, columns)."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    blocks = tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    scales = torch.from_numpy(rng.uniform(0.5, 1.5, blocks) / 100 / np.sqrt(shape[1])).to(torch.bfloat16).float()
    # A block may be far larger than the matrix: repeated so often, its scales would take gigabytes.
    height, width = (min(size, part) for size, part in zip(shape, block, strict=True))
    wide = np.repeat(np.repeat(scales.numpy(), height, 0)[: shape[0]], width, 1)[:, : shape[1]]
    # The positive numbers ascend with their codes.
    wanted = np.minimum(np.abs(rng.standard_normal(shape) * 100), 448)
    bits = np.searchsorted(E4M3_VALUES[:127], wanted) | np.where(rng.random(shape) < 0.5, 128, 0)
    return Fp8Matrix(bits.astype(np.uint8), wide)


def packed_words(nibbles: np.ndarray, places: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """int32 [..., m]: nibbles [..., 8·m] in words of eight; nibble i of a word is element places[i] of its eight."""
    eights = nibbles.astype(np.uint32).reshape(*nibbles.shape[:-1], -1, 8)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for i, place in enumerate(places):
        words |= eights[..., place] << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq_parts(matrix: Quantized, version: int = 1) -> Parts:
    """AutoGPTQ's and GPTQModel's tensors; version 1 stores zero points less one, masked to four bits."""
    zeros = matrix.zeros.T if version == 2 else (matrix.zeros.T - 1) & 15
    return {
        "qweight": packed_words(matrix.codes).T.contiguous(),
        "qzeros": packed_words(zeros),
        "scales": matrix.scales.T.contiguous(),
        "g_idx": torch.from_numpy(matrix.index.astype(np.int32)),
    }


def gptq_config(group: int, **more: Any) -> dict[str, Any]:
    """`quantization_config` of a GPTQ checkpoint."""
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True, **more}


def awq_parts(matrix: Quantized) -> Parts:
    """AutoAWQ's tensors, version GEMM."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed_words(matrix.codes.T, order),
        "qzeros": packed_words(matrix.zeros.T, order),
        "scales": matrix.scales.T.contiguous(),
    }


def awq_config(group: int, **more: Any) -> dict[str, Any]:
    """`quantization_config` of an AWQ checkpoint."""
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True, **more}


def compressed_parts(matrix: Quantized) -> Parts:
    """compressed-tensors' `pack-quantized` tensors."""
    parts = {
        "weight_packed": packed_words(matrix.codes),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if (matrix.zeros != 8).any():
        parts["weight_zero_point"] = packed_words(matrix.zeros.T).T.contiguous()
    if (np.diff(matrix.index) < 0).any():
        parts["weight_g_idx"] = torch.from_numpy(matrix.index.astype(np.int32))
    return parts


def compressed_config(group: int, **weights: Any) -> dict[str, Any]:
    """`quantization_config` of a compressed-tensors checkpoint; `weights` are of the one group's weights."""
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def is_projection(name: str) -> bool:
    """Whether a tensor is one of those that such checkpoints quantize."""
    return name.endswith("_proj.weight")


def write_quantized(
    directory: Path,
    make: Callable[[str, tuple[int, int]], M],
    pack: Packer,
    config: Mapping[str, Any] | None,
    *,
    change: Callable[[dict[str, Tensor]], None] | None = None,
    files: Mapping[str, Mapping[str, Any]] | None = None,
    head: bool = False,
    **sizes: Any,
) -> dict[str, M]:
    """Write a checkpoint with every projection quantized.

    Args:
        make: gives the quantized matrix of a name and shape.
        pack: its tensors in the format wanted.
        config: `quantization_config` for config.json, or None for none.
        change: may edit the tensors before they are written.
        files: further JSON files.
        head: quantize `lm_head` too.
        sizes: of `CheckpointShape`.

    Returns:
        The matrices by the name of the weight they stand for.
    """
    matrices: dict[str, M] = {}

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if is_projection(name) or (head and name == "lm_head.weight")]:
            shape = tuple(tensors.pop(name).shape)
            matrices[name] = make(name, (shape[0], shape[1]))
            parts = pack(matrices[name])
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
        if change is not None:
            change(tensors)

    spec = replace(CheckpointShape(intermediate=320), **sizes)
    write_checkpoint(directory, spec, quantize)
    added = dict(files or {})
    if config is not None:
        added["config.json"] = {**json.loads((directory / "config.json").read_text()), "quantization_config": config}
    for name, contents in added.items():
        (directory / name).write_text(json.dumps(contents))
    return matrices


def write_dequantized(directory: Path, matrices: Mapping[str, Quantized | Fp8Matrix], **sizes: Any) -> Path:
    """The plain checkpoint of the same weights, in FP32."""

    def dequantize(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = matrices[name].weight() if name in matrices else tensor.float()

    # What is not quantized is rounded as in the quantized checkpoint first.
    return write_checkpoint(directory, replace(CheckpointShape(intermediate=320), **sizes), dequantize)
