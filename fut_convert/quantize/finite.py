"""The check that every quantizer makes: a weight that is not a number has no scale."""

from __future__ import annotations

import torch
from torch import Tensor

from fut_convert.errors import ConvertError


class NonFiniteWeightError(ConvertError):
    """A matrix to be quantized holds NaN or infinity."""


def require_finite(weight: Tensor, maxima: Tensor) -> None:
    """Raise unless all maxima of |weight| are finite; looks at the weights themselves only to say what is wrong.

    Args:
        weight: [out, in].
        maxima: absolute maxima of any partition of `weight`; a maximum over NaN must be NaN, as `amax` makes it.

    Raises:
        NonFiniteWeightError: names the first row and column and how many values are affected.
    """
    if bool(torch.isfinite(maxima).all()):
        return
    bad = ~torch.isfinite(weight)
    rows = int(bad.any(dim=1).sum())
    row, column = (int(i) for i in bad.nonzero()[0])
    raise NonFiniteWeightError(
        f"weight {list(weight.shape)} holds {int(bad.sum())} values that are not finite in {rows} rows, "
        f"the first at row {row}, column {column} ({weight[row, column].item()}); the checkpoint is damaged"
    )
