"""Numbers and names as the report's page, its plots and the terminal print them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fut_runtime.markdown_table import FORMAT_NAMES, path_name, percent, text_name

__all__ = ["FORMAT_NAMES", "PLOTS", "finite", "path_name", "percent", "size", "text_name"]

#: Folder of the plots, beside the page.
PLOTS = "report"


def size(count: int | None) -> str:
    """Bytes in decimal units."""
    if count is None:
        return ""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}" if unit == "GB" else f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def finite(value: Any) -> Any:
    """A value with None for every number that JSON does not have, and lists for tuples."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
