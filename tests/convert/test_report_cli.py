"""`fut-convert`'s options for the report, and what happens when the report fails after the conversion has succeeded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from fut_convert import convert
from fut_convert.cli import main
from fut_convert.errors import ConvertError
from fut_runtime.artifact.reader import Artifact
from fut_runtime.errors import FutError
from fut_runtime.termination import Terminated

pytestmark = pytest.mark.reports

Make = Callable[..., Path]
QUICK = ("--calibration-windows", "1", "--window-tokens", "48", "--allow-few-tokens")


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture
def checkpoint(tiny_checkpoint: Make) -> Path:
    return tiny_checkpoint("model", layers=1, max_positions=64)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "wiki.txt"
    path.write_text("The tide comes in twice a day, and goes out as often. " * 30)
    return path


def test_the_plan_shows_what_will_be_evaluated(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    options = (checkpoint, tmp_path / "out", *QUICK, "--dry-run", "--evaluate", text)
    assert "evaluation: 3 windows of 64 tokens, text wiki.txt" in run(*options, "--evaluate-windows", 3).stdout
    record = json.loads(run(*options, "--json").stdout)["evaluation"]
    assert record["whole_text"] and record["windows"] > 3 and record["window_tokens"] == 64
    plain = json.loads(run(*options[:-2], "--json").stdout)
    assert plain["evaluation"] is None
    assert plain["memory_bytes"] < json.loads(run(*options, "--json").stdout)["memory_bytes"]
    assert not (tmp_path / "out").exists()


def test_the_summary_names_the_report_and_its_figures(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    result = run(checkpoint, tmp_path / "out", *QUICK, "--evaluate", text, "--evaluate-windows", 2)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    for words in ("decode error", "prefill error", "of the residual", "perplexity", "INT4 cache", "report"):
        assert words in said
    as_json = run(checkpoint, tmp_path / "json", *QUICK, "--evaluate", text, "--evaluate-windows", 1, "--json")
    figures = json.loads(as_json.stdout)
    assert figures["report"] == "report.md" and len(figures["accuracy"]["rows"]) == 7
    assert figures["accuracy"]["rows"][1]["result"]["kl"]["standard_error"] is None
    assert set(figures["step_peak_bytes"]) == set(figures["step_seconds"])
    quiet = json.loads(run(checkpoint, tmp_path / "quiet", *QUICK, "--no-report", "--json").stdout)
    assert quiet["report"] is None and quiet["depth"]["paths"] == [] and "report" not in quiet["step_seconds"]
    assert not list((tmp_path / "quiet").glob("report*"))


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--evaluate-windows", "2"), 2, "give it with --evaluate"),
        (("--evaluate", "{tmp}/wiki.txt", "--no-report"), 2, "--no-report leaves it out"),
        (("--evaluate", "{tmp}/none.txt"), 2, "does not exist"),
        (("--evaluate", "{tmp}/latin1.txt"), 1, "evaluation text latin1.txt: not UTF-8"),
        (("--evaluate", "{tmp}/short.txt"), 1, "evaluation text short.txt has 1 tokens; give a longer one"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_mistakes_are_found_before_any_work(
    args: tuple[str, ...], code: int, message: str, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "latin1.txt").write_bytes("Käse".encode("latin-1") * 9)
    (tmp_path / "short.txt").write_text("a")
    result = run(checkpoint, tmp_path / "out", *QUICK, *(a.format(tmp=tmp_path) for a in args))
    assert result.exit_code == code and message in " ".join(result.stderr.split()), result.stderr
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_without_tokenizer_cannot_be_evaluated(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    result = run(checkpoint, tmp_path / "out", "--no-calibration", "--evaluate", text)
    assert result.exit_code == 1 and "no tokenizer.json" in result.stderr
    assert "without --evaluate" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted; out is whole, but its report is not finished"),
        (Terminated(15), 143, "interrupted; out is whole, but its report is not finished"),
        (
            FutError("window 3 is wrong"),
            1,
            "out is whole, but its report could not be finished: window 3 is wrong",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), 1, "out is whole, but its report could not be finished: CUDA"),
    ],
    ids=["interrupt", "terminated", "refused", "memory"],
)
def test_a_failing_report_does_not_look_like_a_lost_conversion(
    error: BaseException, code: int, message: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fut_convert.report.measure.depth_errors", fail)
    result = run(checkpoint, tmp_path / "out", *QUICK)
    assert result.exit_code == code and message in " ".join(result.stderr.split()), result.stderr
    assert "nothing was left behind" not in result.stderr
    Artifact.open(tmp_path / "out", verify=True)
    assert not list((tmp_path / "out").glob("report*"))


def test_a_bug_in_the_report_is_not_hidden(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("fut_convert.report.measure.depth_errors", fail)
    assert str(run(checkpoint, tmp_path / "out", *QUICK).exception) == "shapes do not match"


@pytest.mark.parametrize("options", [{"evaluate_windows": 2}, {"report": False, "evaluate": "text"}])
def test_contradictions_are_refused(options: dict[str, object], checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="needs a text to evaluate on"):
        convert(str(checkpoint), tmp_path / "out", **options)  # type: ignore[arg-type]
