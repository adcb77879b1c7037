#!/usr/bin/env python3
"""Everything that needs a Hopper card, in one go: tests, accuracy, times; each step bounded, its output kept.

    python benchmarks/on_a_card.py OUT --steps tests,decode
    python benchmarks/on_a_card.py OUT --model SMOLLM2_DIR --text wiki.test.raw --calibration-text wiki.valid.tokens

A step that runs past its limit is killed with all it started, so that a kernel that hangs costs its own step only. OUT
gets a log a step, JSON lines where a step writes them, and `summary.json`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

REPOSITORY = Path(__file__).resolve().parent.parent
#: Test files in the order in which a fault in one explains faults in the next.
TESTS = (
    "test_cuda_projection", "test_cuda_attention", "test_cuda_sampling", "test_cuda_backend", "test_gemm",
    "test_ops_on_card", "test_w8a16", "test_bench_on_card", "test_cuda_read_bandwidth", "test_gptq_on_the_card",
    "test_card_against_cpu",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A command, the group it belongs to, and the seconds it may take."""

    group: str
    name: str
    command: list[str]
    limit_s: float


def steps(out: Path, model: Path | None, text: Path | None, calibration: str) -> list[Step]:
    """All steps, in order; accuracy only where there is a model and a text."""
    python = sys.executable
    fut_run = [python, "-c", "from fut_runtime.cli import main; main()"]
    found = [
        Step("tests", name, [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/gpu/{name}.py"], 150)
        for name in TESTS
    ]
    decode = [*fut_run, "bench", "decode", "--no-peers", "--json", str(out / "decode.jsonl")]
    found += [
        Step("decode", "decode_8b", [*decode, "--shape", "8b", "--batch", "1,8,32", "--context", "1024,4096"], 60),
        Step("decode", "decode_8b_long", [*decode, "--shape", "8b", "--batch", "1", "--context", "131072"], 60),
        Step("decode", "decode_70b", [*decode, "--shape", "70b", "--layers", "8", "--per-layer"], 60),
        Step("decode", "decode_8b_fp8", [*decode, "--shape", "8b", "--mode", "fp8", "--batch", "1,8"], 60),
    ]
    gemm = [*fut_run, "bench", "gemm", "--json", str(out / "gemm.jsonl")]
    found += [
        Step("prefill", "gemm_8b", [*gemm, "--shape", "8b", "--rows", "512,2048,8192"], 60),
        Step("prefill", "gemm_1b", [*gemm, "--shape", "1b", "--rows", "512,2048"], 40),
        Step("prefill", "gemm_70b", [*gemm, "--shape", "70b", "--rows", "512,2048"], 60),
        Step("prefill", "gemm_405b", [*gemm, "--shape", "405b", "--rows", "512,2048"], 90),
    ]
    for name, option in (("decode_projections", "--out"), ("attention_decode", "--output"), ("sampling", "--out")):
        command = [python, f"benchmarks/{name}.py", option, str(out / f"{name}.jsonl")]
        found.append(Step("kernels", name, command, 60))
    layers = [python, "benchmarks/calibrate_layers.py", "--out", str(out / "layers.jsonl")]
    cap = ["--shape", "70b", "--layers", "1", "2", "--device-cap-gb", "80", "--host-cap-gb", "100"]
    found += [
        Step("conversion", "gptq_8b", layers, 120),
        Step("conversion", "rtn_8b", [*layers, "--method", "rtn"], 90),
        Step("conversion", "gptq_70b", [*layers, *cap], 300),
    ]
    if model is not None and text is not None:
        table = [
            python, "benchmarks/accuracy_table.py", str(model), "--text", str(text), "--calibration-text", calibration,
            "--device", "cuda", "--label", model.name, "--out", str(out / "accuracy.jsonl"), "--rows",
        ]  # fmt: skip
        found.append(Step("accuracy", f"accuracy_{model.name}", [*table, "published,gptq,gptq-builtin"], 240))
        cache = [
            python, "benchmarks/kv_cache_table.py", str(model), "--text", str(text), "--device", "cuda",
            "--label", model.name, "--out", str(out / "kv_cache.jsonl"), "--window", "2048", "--window", "8192",
        ]  # fmt: skip
        found.append(Step("cache", f"kv_cache_{model.name}", cache, 500))
    return found


def run(step: Step, log: Path) -> str:
    """Run a step; `passed`, `failed` or `killed`."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            step.command,
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return "passed" if process.wait(timeout=step.limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "killed"


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", "groups", default="tests,kernels,decode,prefill,accuracy,conversion", show_default=True)
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Checkpoint directory for accuracy.")
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="Text to score.")
@click.option("--calibration-text", default="builtin", show_default=True)
def main(out: Path, groups: str, model: Path | None, text: Path | None, calibration_text: str) -> None:
    """Run the steps of the named groups, in the order in which the groups are named."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = steps(out, model, text, calibration_text)
    summary = []
    for group in groups.split(","):
        for step in (s for s in known if s.group == group):
            started = time.monotonic()
            log = out / f"{step.name}.log"
            outcome = run(step, log)
            seconds = round(time.monotonic() - started, 1)
            summary.append({"step": step.name, "outcome": outcome, "seconds": seconds})
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            last = log.read_text("utf-8", "replace").strip().splitlines()[-6 if outcome != "passed" else -2 :]
            print(f"{step.name:28s} {outcome:7s} {seconds:7.1f} s", *last, sep="\n    ", flush=True)
    sys.exit(any(entry["outcome"] != "passed" for entry in summary))


if __name__ == "__main__":
    main()
