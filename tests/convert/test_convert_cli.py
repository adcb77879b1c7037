"""`fut-convert`: options, output, exit codes, and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from fut_convert.cli import main
from fut_runtime.artifact.reader import Artifact
from repository import REPOSITORY
from synthetic_checkpoint import CheckpointShape, write_checkpoint
from test_documentation import code_blocks

Make = Callable[..., Path]
QUICK = ("--calibration-windows", "1", "--window-tokens", "48", "--allow-few-tokens")


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture
def checkpoint(tiny_checkpoint: Make) -> Path:
    return tiny_checkpoint("model[1]", layers=1)


def test_every_option_is_documented() -> None:
    page = (REPOSITORY / "docs" / "convert.md").read_text(encoding="utf-8")
    for parameter in main.params:
        for option in parameter.opts:
            assert not option.startswith("--") or f"`{option}`" in page, f"docs/convert.md does not describe {option}"


def test_the_documented_example_runs(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_checkpoint("checkpoint")
    monkeypatch.chdir(tmp_path)
    (example,) = code_blocks(REPOSITORY / "docs" / "convert.md", "python")
    exec(compile(example, "docs/convert.md", "exec"), {})
    output = capsys.readouterr().out
    assert "4/4 sealing" in output and "worst INT4 module" in output
    assert Artifact.open(tmp_path / "artifact").manifest.recipe["int4"]["group_size"] == 64


def test_help_teaches() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for word in ("MODEL", "OUT", "Examples:", "fut-convert", "Exit codes: 0 done", "--dry-run", "--no-calibration"):
        assert word in result.stdout


def test_a_conversion_reports_what_it_did(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out [bold]"
    result = run(checkpoint, out, *QUICK, "--group-size", "64", "--head", "int4", "--weights", " int4, e4m3")
    assert result.exit_code == 0, result.output
    for word in ("size", "time", "memory", "e4m3 error", "int4 error"):
        assert word in result.stdout
    assert "model[1]: " in result.stderr
    assert "warning: calibration has 48 tokens" in result.stderr
    manifest = Artifact.open(out).manifest
    assert manifest.recipe["weights"] == ["e4m3", "int4"]
    assert manifest.weights["head"]["int4"].group_size == 64


def test_the_options_override_the_recipe(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some words to calibrate on. " * 20)
    options = {
        "scale-method": "search", "gain": "folded", "scale-dtype": "float16", "nibble-order": "linear/1",
        "calibration-text": str(tmp_path / "text.txt"), "calibration-windows": "3", "window-tokens": "20",
        "margin": "2", "max-shard-gb": "0.5", "group-size": "auto", "calibration-field": "body",
    }  # fmt: skip
    args = [word for name, value in options.items() for word in (f"--{name}", value)]
    result = run(checkpoint, tmp_path / "out", "--recipe", "demo", "--dry-run", "--json", "--allow-few-tokens",
                 "--no-requantize", *args)  # fmt: skip
    assert result.exit_code == 0, result.output
    recipe = json.loads(result.stdout)["recipe"]
    assert recipe["name"] == "demo"
    assert recipe["int4"] == {
        "method": "rtn", "scale_method": "search", "group_size": "auto", "group_size_overrides": {}, "gain": "folded",
        "scale_dtype": "float16", "nibble_order": "linear/1", "requantize": "never",
    }  # fmt: skip
    assert recipe["calibration"] == {
        "enabled": True, "text": "text.txt", "field": "body", "windows": 3, "window_tokens": 20,
        "allow_few_tokens": True,
    }  # fmt: skip
    assert recipe["activation"] == {"margin": 2} and recipe["max_shard_gb"] == 0.5


def test_a_dry_run_shows_the_plan_and_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, tmp_path / "out", "--dry-run", "--group-size", "128", *QUICK)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any(line.split()[:4] == ["down", "int4", "128×192", "128"] for line in lines)
    assert "model[1]: LlamaForCausalLM, 1 layers" in result.stdout
    for word in ("padded: down int4 to 128×256", "memory about", "free in", "calibration: ", "tokenizer.json"):
        assert word in result.stdout
    assert "warning: down: group size 128 as forced does not divide" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["model[1]"]


def test_a_dry_run_of_what_cannot_be_done_fails(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    result = run(checkpoint, tmp_path / "out", "--dry-run", "--json", *QUICK)
    assert result.exit_code == 1
    plan = json.loads(result.stdout)
    assert plan["errors"] and plan["errors"][0] in result.stderr
    assert "module" in plan["modules"][0] and plan["output_bytes"] > 0


def test_json_is_all_there_is_on_standard_output(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, tmp_path / "out", *QUICK, "--json")
    assert result.exit_code == 0 and result.stderr == ""
    report = json.loads(result.stdout)
    assert report["path"] == str(tmp_path / "out")
    assert report["warnings"] and report["seconds"] > 0 and report["peak_memory_bytes"] > 1e7
    assert {"plan", "read", "calibrate", "quantize", "write", "seal"} <= set(report["step_seconds"])
    assert set(report["module_error"]) >= {"layers.0.qkv.e4m3", "layers.0.down.int4"}


MISTAKES = [
    (("{model}", "{out}", "--recipe", "dmeo"), 2, "did you mean 'demo'"),
    (("{model}", "{out}", "--recipe", "{tmp}/wrong.yaml"), 2, r"unknown key 'int4.groupsize'; did you mean"),
    (("{model}", "{out}", "--group-size", "48"), 2, "int4.group_size is 48, expected one of auto, 32, 64, 128"),
    (("{model}", "{out}", "--group-size", "²"), 2, "int4.group_size is '²'"),
    (("{model}", "{out}", "--weights", "e4m3,int5"), 2, "weights is ['e4m3', 'int5'], expected a list of"),
    (("{model}", "{out}", "--weights", ""), 2, "weights is ['']"),
    (("{model}", "{out}", "--head", "fp8"), 2, "head is 'fp8'"),
    (("{model}", "{out}", "--margin", "nan"), 2, "activation.margin is nan"),
    (("{model}", "{out}", "--margin", "x"), 2, "not a valid float"),
    (("{model}", "{out}", "--window-tokens", "1"), 2, "not in the range"),
    (("{model}", "{out}", "--no-calibration", "--scale-method", "weighted_search"), 2, "choose search"),
    (("{model}", "{out}", "--no-calibration", "--calibration-windows", "2"), 2, "--calibration-windows says how"),
    (("{model}",), 2, "Missing argument 'OUT'"),
    (("{tmp}/nothing/here", "{out}"), 1, "no such file or directory, and not a Hub id"),
    (("{tmp}/empty", "{out}"), 1, "no config.json"),
    (("{model}", "{out}", "--revision", "main"), 1, "is a local path, which has no revision"),
    (("{model}", "{out}", "--device", "tpu"), 1, "device 'tpu' is unknown"),
    (("{model}", "{out}", "--device", "meta"), 1, "device 'meta' is not supported"),
    (("{model}", "{out}", "--device", "cuda:4000"), 1, "PyTorch sees"),
    (("{model}", "{out}", "--calibration-windows", "3"), 1, "needs 8192 at least"),
    (("{model}", "{out}", "--no-calibration", "--allow-few-tokens"), 2, "--allow-few-tokens says how"),
    (("{model}", "{out}", "--calibration-text", "{tmp}/no.txt"), 1, "no.txt: No such file"),
    (("{model}", "{out}", "--calibration-text", "{tmp}/latin1.txt"), 1, "latin1.txt: not UTF-8"),
    (("{model}", "{out}", "--scale-dtype", "float16", "--nibble-order", "linear/2"), 2, "did you mean linear/1?"),
    (("{model}", "{tmp}/full", *QUICK), 1, "exists already"),
    (("{model}", "{tmp}/full", "--overwrite", *QUICK), 1, "was not made by this program"),
    (("{model}", "{tmp}/latin1.txt", *QUICK), 1, "is a file"),
    (("{model}", "{tmp}/latin1.txt/out", *QUICK), 1, "is a file, expected a directory"),
    (("{model}", "{model}", *QUICK), 1, "exists already"),
]


@pytest.mark.parametrize(("args", "code", "message"), MISTAKES, ids=[" ".join(m[0][:4]) for m in MISTAKES])
def test_mistakes_are_explained_without_a_traceback(
    args: tuple[str, ...], code: int, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong.yaml").write_text("int4: {groupsize: 64}\n")
    (tmp_path / "latin1.txt").write_bytes("Käse".encode("latin-1") * 9)
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    result = run(*(a.format(model=checkpoint, out=tmp_path / "out", tmp=tmp_path) for a in args))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code and result.stdout == ""
    assert message in " ".join(result.stderr.split()), result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 byte"), 1, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), 1, "out of memory"),
        (MemoryError(), 1, "out of memory"),
        (PermissionError(13, "Permission denied", "/some/file"), 1, "/some/file: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was left behind"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_machines_failures_are_explained(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fut_convert.pipeline.convert", fail)
    result = run("model", "out")
    assert result.exit_code == code and message in result.stderr


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("fut_convert.pipeline.convert", fail)
    assert str(run("model", "out").exception) == "shapes do not match"


#: The program with a source so slow that it can be interrupted in the middle.
SLOW = """
import time
from fut_convert.sources.base import Source
read = Source.load_rows
def slow(self, name, start, stop):
    time.sleep(0.1)
    return read(self, name, start, stop)
Source.load_rows = slow
from fut_convert.cli import main
main()
"""


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_kill_leave_nothing_unsaid_and_a_later_run_works(
    tiny_checkpoint: Make, tmp_path: Path, number: int, exit_code: int
) -> None:
    checkpoint, out = tiny_checkpoint(layers=8), tmp_path / "out"
    args = [str(checkpoint), str(out), *QUICK]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *args], stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    deadline = time.monotonic() + 120
    while not any((tmp_path / "out.partial").glob("model*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == exit_code, stderr
    said = stderr.splitlines()[-1]
    if said == "interrupted; nothing was left behind":
        assert [p.name for p in tmp_path.iterdir()] == [checkpoint.name]
    else:  # on a busy machine the signal may come after the first layer
        assert re.fullmatch(r"interrupted; out\.partial keeps \d of 8 layers: the same command goes on .*", said), (
            stderr
        )
    assert run(*args).exit_code == 0
    Artifact.open(out, verify=True)


def test_errors_that_are_no_numbers_are_null_in_json(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] *= 1e30

    checkpoint = write_checkpoint(tmp_path / "model", CheckpointShape(layers=1), change)
    args = ("--no-calibration", "--scale-method", "absmax_7", "--json")
    text = run(checkpoint, tmp_path / "out", *args).stdout
    assert "NaN" not in text and json.loads(text)["module_error"]["layers.0.down.e4m3"] is None
    assert "NaN" not in (tmp_path / "out" / "conversion_log.json").read_text()
