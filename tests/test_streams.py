"""The programs started with streams that are closed, or that cannot hold every character."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fut_convert import convert

QUICK = {"calibration.enabled": False, "int4.scale_method": "absmax_7"}


@pytest.fixture
def artifact(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return convert(str(tiny_checkpoint(layers=1)), tmp_path / "art", overrides=QUICK).path


def start(module: str, *args: object, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", f"from {module} import main; main()", *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True, **options)  # type: ignore[call-overload,no-any-return]


def test_an_encoding_without_our_characters(artifact: Path, tmp_path: Path) -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = start("fut_runtime.artifact.cli", "inspect", artifact, env=ascii_only)
    assert shown.returncode == 0, shown.stderr
    args = (tmp_path / "checkpoint", tmp_path / "new", "--no-calibration", "--scale-method", "absmax_7")
    done = start("fut_convert.cli", *args, env=ascii_only)
    assert done.returncode == 0 and b"\\u2192" in done.stdout, done.stderr
    prompt = ("--prompt", "é", "--max-new-tokens", "2", "--device", "cpu", "--json")
    generated = start("fut_runtime.cli", "generate", artifact, *prompt, env={**ascii_only, "PYTHONUTF8": "1"})
    assert json.loads(generated.stdout)["prompt"] == "é", generated.stderr


def test_a_file_name_that_is_not_utf_8(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"out\xff")
    done = start("fut_convert.cli", tiny_checkpoint(layers=1), out, "--no-calibration", "--scale-method", "absmax_7")
    assert done.returncode == 0 and b"\\udcff" in done.stdout, done.stderr


def test_closed_streams(artifact: Path) -> None:
    command = [sys.executable, "-c", "from fut_runtime.cli import main; main()", "generate", str(artifact), "--prompt"]
    shell = ["sh", "-c", '"$@" hi --max-new-tokens 2 --device cpu <&- >&-', "sh", *command]
    done = subprocess.run(shell, check=False, capture_output=True)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
