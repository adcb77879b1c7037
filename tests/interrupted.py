"""Conversions that stop in the middle, recipes to try that with, and what their artifacts hold in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from fut_convert import convert
from fut_convert.conversion import Conversion
from fut_runtime.artifact.reader import Artifact

SHORT = {"calibration.windows": 3, "calibration.window_tokens": 40, "calibration.allow_few_tokens": True}
RECIPES: dict[str, dict[str, Any]] = {
    "uncalibrated": {"calibration.enabled": False, "int4.scale_method": "absmax_7", "max_shard_gb": 0.001},
    "rtn": {**SHORT, "head": "e4m3"},
    "gptq": {**SHORT, "int4.method": "gptq", "head": "int4", "max_shard_gb": 0.001},
}


def sealed(path: Path) -> dict[str, bytes]:
    """Every sealed file with its bytes, the list of them and the marker too; but for the report nothing else may lie
    there.
    """
    found = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    found = {n: data for n, data in found.items() if n != "conversion_log.json" and not n.startswith("report")}
    assert set(found) == {*Artifact.open(path, verify=True).files, "fut_files.json", "fut_sealed.json"}
    return found


class StopError(Exception):
    """Ends a conversion at a chosen layer."""


def stopped_at(layer: int, monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
    original = Conversion._layer

    def stop(self: Conversion, index: int) -> None:
        if index == layer:
            raise error or StopError
        original(self, index)

    monkeypatch.setattr(Conversion, "_layer", stop)


def interrupted(checkpoint: Path | str, out: Path, overrides: dict[str, Any], layer: int, **more: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(layer, patch)
        with pytest.raises(StopError):
            convert(str(checkpoint), out, overrides=overrides, **more)


def workers_alive() -> list[psutil.Process]:
    """The processes that work for this one."""
    return [p for p in psutil.Process().children() if any("import serve" in part for part in p.cmdline())]
