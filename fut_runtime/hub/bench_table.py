"""The lines that `fut-run bench decode --json` wrote, as tables for a model card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fut_runtime.artifact.json_text import parse_object
from fut_runtime.errors import ArtifactError
from fut_runtime.markdown_table import table

#: One table for the lines that are alike in these.
_SETUP = ("card", "shape", "layers", "mode", "head", "kv_cache_bits", "sampling", "random_weights", "futransformer")
_NUMBERS = ("batch", "context", "step_ms", "host_ms", "tokens_per_s", "fraction")
_HEADER = ("requests", "tokens of context", "step, ms", "with host, ms", "tokens a second", "of memory bandwidth")


def read_bench(file: Path) -> list[dict[str, Any]]:
    """Lines of `bench decode`; those of other measurements are passed over.

    Raises:
        ArtifactError: the file cannot be read, a line is no JSON object, or one of `bench decode` lacks a figure.
    """
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read ({error.strerror})") from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        data = parse_object(line, f"{file}, line {number}")
        if data.get("bench") != "decode":
            continue
        for key in _NUMBERS:
            if isinstance(data.get(key), bool) or not isinstance(data.get(key), (int, float)):
                raise ArtifactError(
                    f"{file}, line {number}: {key} is {data.get(key)!r}, expected a number; give what "
                    "fut-run bench decode --json wrote"
                )
        lines.append(data)
    return lines


def bench_lines(lines: list[dict[str, Any]]) -> Iterator[str]:
    """A sentence on the setup and a table for each."""
    setups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        setups.setdefault(tuple(str(line.get(key)) for key in _SETUP), []).append(line)
    for number, members in enumerate(setups.values()):
        if number:
            yield ""
        yield _setup(members[0])
        yield ""
        rows = [
            (
                str(line["batch"]), str(line["context"]), f"{line['step_ms']:.3f}", f"{line['host_ms']:.3f}",
                f"{line['tokens_per_s']:.0f}", f"{line['fraction']:.0%}",
            )
            for line in members
        ]  # fmt: skip
        yield from table(_HEADER, rows, align="rrrrrr")


def _setup(line: dict[str, Any]) -> str:
    weights = f"random weights of the shape {line.get('shape')}" if line.get("random_weights") else "this artifact"
    return (
        f"Decode steps on {line.get('card')}: {weights}, {line.get('layers')} layers, {line.get('mode')} weights, "
        f"{line.get('head')} head, {line.get('kv_cache_bits')}-bit cache, {line.get('sampling')} sampling, "
        f"futransformer {line.get('futransformer')}. Every request has so many tokens of context."
    )
