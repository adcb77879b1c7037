"""Telling an already quantized checkpoint by its config or its tensors, and naming its format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fut_convert.sources.base import TensorInfo

#: `quant_method` of a `quantization_config` -> the format's usual name.
_METHODS: dict[str, str] = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "finegrained_fp8": "FP8 (fine-grained)",
    "bitsandbytes": "bitsandbytes",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
}

#: Last part of a tensor's name -> the format that stores such tensors. The order decides when several match.
_SUFFIXES: tuple[tuple[str, str], ...] = (
    (".g_idx", "GPTQ"),
    (".weight_packed", "compressed-tensors"),
    (".qweight", "GPTQ or AWQ"),
    (".qzeros", "GPTQ or AWQ"),
    (".SCB", "bitsandbytes (8 bits)"),
    (".weight.absmax", "bitsandbytes (4 bits)"),
    (".weight.quant_map", "bitsandbytes (4 bits)"),
    (".weight_scale", "compressed-tensors or FP8"),
    (".weight_scale_inv", "FP8 (block scales)"),
)

_REMEDY = "give the original checkpoint (F32, F16 or BF16) it was made from"


def quantization_method(section: Mapping[str, Any]) -> str:
    """Name of the format a `quantization_config` section describes; what it says itself if that is unknown."""
    method = section.get("quant_method")
    if method is None and (section.get("load_in_4bit") or section.get("load_in_8bit")):
        method = "bitsandbytes"
    if method is None and "bits" in section:
        method = "gptq"
    if method is None and "w_bit" in section:
        method = "awq"
    return _METHODS.get(str(method), str(method))


def refusal(where: str, method: str) -> str:
    """Message for a checkpoint that is quantized already."""
    return f"{where}: the weights are quantized already ({method}), which cannot be converted; {_REMEDY}"


def quantized_tensors(tensors: Iterable[TensorInfo]) -> str | None:
    """Message that names the quantized format these tensors are in, or None for a plain checkpoint.

    The config of such a checkpoint does not always say so: GPTQ and AWQ used to keep it in a file of their own.
    """
    found: dict[str, TensorInfo] = {}
    for info in tensors:
        for suffix, method in _SUFFIXES:
            if info.name.endswith(suffix):
                found.setdefault(method, info)
        if info.dtype.startswith("F8_"):
            found.setdefault("FP8", info)
    for method in dict.fromkeys([m for _, m in _SUFFIXES] + ["FP8"]):
        if method in found:
            info = found[method]
            return refusal(f"{info.file}: {info.name} ({info.dtype})", method)
    return None
