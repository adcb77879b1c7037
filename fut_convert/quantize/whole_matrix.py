"""GPTQ of one module: the matrix as it will be stored, its scales, its codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fut_convert.quantize import gptq
from fut_convert.quantize.auto_gptq import auto_gptq_int4
from fut_convert.quantize.correction import corrected_weight
from fut_convert.quantize.fold import fold_gain
from fut_convert.quantize.gptq import GptqResult, GptqSettings, solve_int4
from fut_convert.quantize.module import SCALE_DTYPES, Int4Codes
from fut_convert.quantize.scales import int4_scales
from fut_runtime.artifact.manifest import WeightSpec


def gptq_module(
    weight: Tensor,
    spec: WeightSpec,
    hessian: Tensor,
    *,
    gain: Tensor | None,
    settings: GptqSettings,
    wanted: Tensor | None = None,
    solver: str = "fut",
) -> tuple[Int4Codes, GptqResult]:
    """Scales and codes of a whole matrix.

    Args:
        weight: [out, in] in the checkpoint's dtype, natural row order.
        spec: of its INT4 format.
        hessian: FP32 [in, in], the mean of xxᵀ over what enters the product: after the gain where that is applied at
            run time, before it where it is folded.
        gain: [in] of the RMSNorm before it; folded where the spec says so.
        wanted: FP32 [out, in], the mean of txᵀ with t what the module is to put out, see `corrected_weight`; None for
            what the given weight makes of x.
        solver: `fut`, or `auto-gptq`, which chooses its own scales.

    Raises:
        ConvertError: a weight is not finite, or a scale does not fit its type.
    """
    values = weight.to(hessian.device, torch.float32)
    if gain is not None and spec.gain == "folded":
        values = fold_gain(values, gain.to(hessian.device))
    extra = spec.padded_shape[1] - spec.shape[1]
    if extra:
        values, hessian = pad(values, (0, extra)), pad(hessian, (0, extra, 0, extra))
    group_size = spec.group_size or 0
    scale_dtype = SCALE_DTYPES[spec.scale_dtype or ""]
    if solver == "auto-gptq":
        scales, result = auto_gptq_int4(values, hessian, group_size, settings, scale_dtype=scale_dtype)
        return Int4Codes(result.codes, scales), result
    factor = gptq.factorize(hessian, settings)
    if wanted is not None and factor is not None:
        wanted = pad(wanted, (0, extra)) if extra else wanted
        values = corrected_weight(values, hessian, wanted, factor, settings.correction)
    scales = int4_scales(
        values,
        group_size,
        spec.scale_method or "",
        second_moment=hessian.diagonal() if spec.scale_method == "weighted_search" else None,
        scale_dtype=scale_dtype,
    )
    result = solve_int4(values, hessian, scales, group_size, settings, factor)
    return Int4Codes(result.codes, scales), result
