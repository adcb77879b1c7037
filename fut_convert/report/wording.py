"""Numbers and names as the report's page, its plots and the terminal print them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Folder of the plots, beside the page.
PLOTS = "report"
#: What a reader calls the weight formats.
FORMAT_NAMES = {"int4": "INT4", "e4m3": "E4M3", "bf16": "BF16"}


def percent(value: float | None, digits: int = 2) -> str:
    """A share as per cent; what is no number is said to be none."""
    return "not finite" if value is None else f"{100 * value:.{digits}f} %"


def estimate(value: Mapping[str, float | None] | None, digits: int = 4, factor: float = 1.0) -> str:
    """A mean with its standard error, or without where there is none."""
    if value is None:
        return ""
    mean, error = value["mean"], value["standard_error"]
    if mean is None:
        return "not finite"
    return f"{factor * mean:.{digits}f}" + ("" if error is None else f" ± {factor * error:.{digits}f}")


def size(count: int | None) -> str:
    """Bytes in decimal units."""
    if count is None:
        return ""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}" if unit == "GB" else f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def path_name(row: Mapping[str, Any]) -> str:
    """Protocol, weights and cache of a row of the report."""
    return f"{row['protocol']}: {row['name']}" + (f", {row['cache']} cache" if row["cache"] else "")


def text_name(record: Mapping[str, Any]) -> str:
    """A text and its windows."""
    name = "the text that ships with the converter" if record["text"] == "builtin" else f"`{record['text']}`"
    return f"{name} ({record['windows']} windows of {record['window_tokens']} tokens)"


def finite(value: Any) -> Any:
    """A value with None for every number that JSON does not have, and lists for tuples."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
