"""Tables of Markdown, and the table of accuracy that a conversion's report and a model card share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

#: What a reader calls the weight formats.
FORMAT_NAMES = {"int4": "INT4", "e4m3": "E4M3", "bf16": "BF16"}

_ACCURACY_HEADER = (
    "protocol", "weights and activations", "KV cache", "perplexity", "nats a token more", "KL, nats a token",
    "same top-1, %",
)  # fmt: skip
_PROTOCOLS = (
    "`prefill`: every token through the prefill path. `decode`: every token through the decode path. "
    "`serve`: the first half of each window prefilled, the rest decoded."
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> Iterator[str]:
    """Lines of a table; `align` has an `l` or an `r` for each column."""
    yield _cells(header)
    yield "|" + "|".join("---:" if a == "r" else "---" for a in align[: len(header)]) + "|"
    yield from map(_cells, rows)


def accuracy_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    """What was measured on a text: `accuracy` of `report.json`, which has rows, as a table between two paragraphs."""
    text = text_name(measured["text"])
    yield (
        f"{text[0].upper()}{text[1:]}, every token of a window but its first scored; ± is one standard error over "
        f"windows. {measured['independence']}"
    )
    yield ""
    rows = []
    for row in measured["rows"]:
        result = row["result"]
        perplexity = "not finite" if result["perplexity"] is None else f"{result['perplexity']:.3f}"
        rows.append(
            (
                row["protocol"] or "", row["name"], row["cache"], perplexity, estimate(result["nll_difference"]),
                estimate(result["kl"]), estimate(result["top1"], 2, 100),
            )
        )  # fmt: skip
    yield from table(_ACCURACY_HEADER, rows, align="lllrrrr")
    yield ""
    yield (
        f"{_PROTOCOLS} Differences, KL(checkpoint ‖ artifact) and agreement on the most likely token are against the "
        "first row. All other rows compute with every rounding that the artifact's format prescribes."
    )


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


def path_name(row: Mapping[str, Any]) -> str:
    """Protocol, weights and cache of a row of the report."""
    return f"{row['protocol']}: {row['name']}" + (f", {row['cache']} cache" if row["cache"] else "")


def text_name(record: Mapping[str, Any]) -> str:
    """A text and its windows."""
    name = "the text that ships with the converter" if record["text"] == "builtin" else f"`{record['text']}`"
    return f"{name} ({record['windows']} windows of {record['window_tokens']} tokens)"


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
