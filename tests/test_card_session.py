"""`benchmarks/on_a_card.py` and `benchmarks/sanitize.py` without a card: what they would run, and how they judge it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from repository import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import on_a_card
import sanitize
from on_a_card import Step

GPU = REPOSITORY / "tests" / "gpu"


def test_every_test_of_the_card_has_its_step_and_the_default_fits_a_session() -> None:
    steps = on_a_card.every_step()
    assert {path.stem for path in GPU.glob("test_*.py")} <= {step.name for step in steps}
    assert len({step.name for step in steps}) == len(steps)
    assert all(step.expected_s < step.limit_s for step in steps)
    chosen = on_a_card.DEFAULT_GROUPS.split(",")
    assert sum(step.expected_s for step in steps if step.group in chosen) <= 25 * 60
    text = CliRunner().invoke(on_a_card.main, ["--help"]).output
    assert all(f"{step.name}: {step.expected_s:g}" in text for step in steps)


def test_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {
        "good": "pass",
        "bad": "raise SystemExit(3)",
        "lacking": "raise SystemExit(77)",
        "slow": "while 1: pass",
    }
    steps = [Step("g", name, [sys.executable, "-c", code], 0.1, 3) for name, code in programs.items()]
    steps.append(Step("g", "too_much", [sys.executable, "-c", "pass"], 1000, 2000))
    monkeypatch.setattr(on_a_card, "steps", lambda *_: steps)
    run = CliRunner().invoke(on_a_card.main, [str(tmp_path), "--steps", "g", "--budget", "100"])
    assert run.exit_code == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [entry["outcome"] for entry in summary] == ["passed", "failed", "not available", "killed", "left out"]
    assert CliRunner().invoke(on_a_card.main, [str(tmp_path), "--steps", "nothing"]).exit_code == 2


def test_the_sanitized_tests_exist() -> None:
    commands = [sanitize.command_of("tool", "memcheck", test, chosen) for test, chosen in sanitize.SMALL.items()]
    arguments = []
    for command in commands:
        assert command[command.index(sys.executable) + 1 :][:2] == ["-m", "pytest"]
        arguments.append([*command[command.index("pytest") + 1 :], "--collect-only"])
    # All in one process: PyTorch takes seconds to import.
    code = "import json, pytest, sys\nfor a in json.loads(sys.argv[1]): print('exit', int(pytest.main(a)))"
    listed = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    found = listed.stdout.split("exit 0\n")
    assert len(found) == len(commands) + 1 and not found[-1], listed.stdout + listed.stderr
    assert all(3 <= names.count("::") <= 15 for names in found[:-1]), listed.stdout


@pytest.mark.parametrize(
    ("code", "log", "verdict"),
    [
        (0, "11 passed in 3 s\n========= ERROR SUMMARY: 0 errors", "clean"),
        (99, "11 passed in 3 s\n========= ERROR SUMMARY: 2 errors", "errors"),
        (1, "1 failed, 3 passed\n========= ERROR SUMMARY: 0 errors", "failed"),
        (None, "", "killed"),
        (0, "11 skipped in 3 s\n========= ERROR SUMMARY: 0 errors", "not available"),
        (5, "55 deselected in 3 s\n========= ERROR SUMMARY: 0 errors", "failed"),
        (1, "========= Error: Unable to find injection library libsanitizer-collection.so", "not available"),
        (1, "========= Device not supported. Please refer to the documentation", "not available"),
    ],
)
def test_verdicts(code: int | None, log: str, verdict: str) -> None:
    assert sanitize.judge(code, log) == verdict


def test_no_tool_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    run = CliRunner().invoke(sanitize.main, ["--out", str(tmp_path)])
    assert run.exit_code == sanitize.NOT_AVAILABLE == on_a_card.NOT_AVAILABLE


def test_a_tool_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\ncase $2 in memcheck) echo 3 passed;; *) exit 99;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize, "find_tool", lambda: str(tool))
    run = CliRunner().invoke(sanitize.main, ["--out", str(tmp_path), "--only", "test_cuda_sampling"])
    assert run.exit_code == 1
    lines = [json.loads(line) for line in (tmp_path / "sanitize.jsonl").read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["clean", "errors"]
