"""A text as windows of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fut_runtime.errors import FutError


def cut_windows(ids: Sequence[int], window_tokens: int, max_windows: int | None = None) -> Tensor:
    """Consecutive windows that do not overlap: int64 [windows, window_tokens]; the tail that fills none is dropped.

    Raises:
        FutError: the text is shorter than one window.
    """
    count = len(ids) // window_tokens
    if count == 0:
        raise FutError(
            f"the text has {len(ids)} tokens, less than one window of {window_tokens}: give a longer text or a "
            "smaller --window"
        )
    if max_windows is not None:
        count = min(count, max_windows)
    return torch.tensor(ids[: count * window_tokens], dtype=torch.int64).view(count, window_tokens)
