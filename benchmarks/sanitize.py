#!/usr/bin/env python3
"""compute-sanitizer's memcheck and racecheck over tests of small shapes on the card; each run bounded.

    python benchmarks/sanitize.py --out OUT
    python benchmarks/sanitize.py --out OUT --tools memcheck --only test_cuda_projection --limit 120

Only our kernels are instrumented. A run is `clean`, has `errors`, was `killed` at its limit, its tests `failed` without
the tool finding anything, or is `not available`: no tool on the path or in a CUDA toolkit, or one that cannot attach to
the card here. OUT gets a log a run and `sanitize.jsonl`. Exit code 1 where a run has errors, failed or was killed; 77
where nothing could be run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

REPOSITORY = Path(__file__).resolve().parent.parent
#: What a test runner calls a test that could not be run.
NOT_AVAILABLE = 77
#: Exit code for errors that the tool finds, none of pytest's.
FOUND = 99
#: Test file -> the tests of it, in pytest's -k; every kernel of a step is in one of them, and prompts' attention.
SMALL = {
    "test_cuda_projection": "test_extreme or (test_products and (48-64 or 100-960))",
    "test_cuda_attention": "(test_chunks_of_prompts and 64) or test_the_counters",
    "test_cuda_sampling": "test_tokens_are_the_hosts and (31 or 1000) and (ties or masked)",
    "test_prefill": "(append and pieces) or alone_and_in_company",
    "test_prefill_attention": "test_output_in_e4m3 or test_what_a_row or (test_chunks and 3-1 and (64 or 128))",
    "test_cuda_backend": "test_a_refused_step or test_a_cancelled or (alone_and_in_company and (2 or 9))",
}
#: What the tool says where it cannot work on a machine.
_CANNOT = (
    "Unable to find injection library",
    "not supported",
    "insufficient permission",
    "Failed to initialize",
    "Target application terminated before first instrumented API call",
    "No such file or directory",
)


def find_tool() -> str | None:
    """The program, on the path or in a toolkit; None where there is none."""
    found = shutil.which("compute-sanitizer")
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    places = [Path(home) / "bin" / "compute-sanitizer" for home in homes if home]
    return found or next((str(place) for place in places if place.is_file()), None)


def command_of(tool: str, check: str, test: str, expression: str) -> list[str]:
    """The command that runs some tests of a file under a check."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    return [
        tool, "--tool", check, "--error-exitcode", str(FOUND), "--target-processes", "all", "--print-limit", "20",
        "--kernel-name", "kns=fut", *pytest, f"tests/gpu/{test}.py", "-k", expression,
    ]  # fmt: skip


def judge(code: int | None, log: str) -> str:
    """What a run says, from its exit code (None: killed) and its output."""
    if code is None:
        return "killed"
    if "ERROR SUMMARY" not in log and "RACECHECK SUMMARY" not in log and any(text in log for text in _CANNOT):
        return "not available"
    if code == FOUND:
        return "errors"
    # All tests skipped, or none chosen: nothing was checked.
    if code == 5 or (code == 0 and " passed" not in log):
        return "not available" if "skipped" in log else "failed"
    return "clean" if code == 0 else "failed"


def run_one(command: list[str], log: Path, limit_s: float) -> str:
    """Run a command with all it starts for at most so long; the verdict."""
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    code: int | None
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return judge(code, log.read_text("utf-8", "replace"))


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--tools", default="memcheck,racecheck", show_default=True)
@click.option("--only", help="Test files, by comma.  [default: all]")
@click.option("--limit", "limit_s", type=float, default=60, show_default=True, help="Seconds a run.")
def main(out: Path, tools: str, only: str | None, limit_s: float) -> None:
    """Run every check over every file."""
    tool = find_tool()
    if tool is None:
        print("not available: no compute-sanitizer on the path or in a CUDA toolkit (CUDA_HOME, /usr/local/cuda)")
        sys.exit(NOT_AVAILABLE)
    out.mkdir(parents=True, exist_ok=True)
    verdicts = []
    for check in tools.split(","):
        for test in only.split(",") if only else SMALL:
            started = time.monotonic()
            log = out / f"{check}_{test}.log"
            verdicts.append(run_one(command_of(tool, check, test, SMALL[test]), log, limit_s))
            line = {"check": check, "tests": test, "verdict": verdicts[-1]}
            line["seconds"] = round(time.monotonic() - started, 1)
            print(json.dumps(line), flush=True)
            if verdicts[-1] != "clean":
                print(*log.read_text("utf-8", "replace").splitlines()[-6:], sep="\n    ", flush=True)
            with (out / "sanitize.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    if any(verdict in ("errors", "failed", "killed") for verdict in verdicts):
        sys.exit(1)
    sys.exit(0 if "clean" in verdicts else NOT_AVAILABLE)


if __name__ == "__main__":
    main()
