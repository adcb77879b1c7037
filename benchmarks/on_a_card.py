#!/usr/bin/env python3
"""Everything that needs a Hopper card, in one go: tests, accuracy, times; each step bounded, its output kept.

    python benchmarks/on_a_card.py OUT --steps tests,decode
    python benchmarks/on_a_card.py OUT --model SMOLLM2_DIR --text wiki.test.raw --calibration-text wiki.valid.tokens
    python benchmarks/on_a_card.py OUT --model SMOLLM2_DIR --text wiki.test.raw --steps kernel_tests,proofs --budget 600

A step that runs past its limit is killed with all it started, so that a kernel that hangs costs its own step only;
with --budget no step begins that is expected to end after so many seconds. --help lists groups, steps and what they are
expected to take. OUT gets a log a step, JSON lines where a step writes them, and `summary.json`.
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
#: Test files and the seconds they take, in the order in which a fault in one explains faults in the next.
KERNEL_TESTS = {
    "test_cuda_projection": 20, "test_cuda_attention": 25, "test_cuda_sampling": 15, "test_cuda_backend": 100,
}  # fmt: skip
OTHER_TESTS = {
    "test_gemm": 20, "test_prefill": 90, "test_prefill_attention": 20, "test_ops_on_card": 30, "test_w8a16": 15,
    "test_bench_on_card": 50, "test_cuda_read_bandwidth": 10, "test_gptq_on_the_card": 30, "test_card_against_cpu": 100,
}  # fmt: skip
#: The most valuable first, for 25 minutes; the other groups are run by name.
DEFAULT_GROUPS = "kernel_tests,proofs,decode,peers,kernels,sanitize"
#: What a step says where the machine lacks what it needs: `sanitize.NOT_AVAILABLE`.
NOT_AVAILABLE = 77


@dataclass(frozen=True)
class Step:
    """A command, the group it belongs to, the seconds it is expected to take, and those it may take."""

    group: str
    name: str
    command: list[str]
    expected_s: float
    limit_s: float


def steps(out: Path, model: Path | None, text: Path | None, calibration: str) -> list[Step]:
    """All steps, in order; proofs and accuracy only where there is a model and a text."""
    found = test_steps()
    if model is not None and text is not None:
        found += proof_steps(out, model, text) + accuracy_steps(out, model, text, calibration)
    return found + speed_steps(out) + conversion_steps(out)


def test_steps() -> list[Step]:
    """Tests, file by file: those of decoding's kernels in a group of their own."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    return [
        Step(group, name, [*pytest, f"tests/gpu/{name}.py"], seconds, max(60, 1.5 * seconds))
        for group, files in (("kernel_tests", KERNEL_TESTS), ("tests", OTHER_TESTS))
        for name, seconds in files.items()
    ]


def proof_steps(out: Path, model: Path, text: Path) -> list[Step]:
    """A small real model, converted, then proved right and steady."""
    python, artifact = sys.executable, out / "proof_artifact"
    convert = [
        python, "-c", "from fut_convert.cli import main; main()", str(model), str(artifact), "--device", "cuda",
        "--weights", "e4m3,int4,bf16", "--no-calibration", "--overwrite",
    ]  # fmt: skip
    accuracy = [python, "benchmarks/decode_accuracy.py", str(artifact), "--text", str(text)]
    prefill = [python, "benchmarks/prefill_accuracy.py", str(artifact), "--text", str(text)]
    soak = [python, "benchmarks/soak_decode.py", str(artifact), "--out", str(out / "soak.jsonl")]
    return [
        Step("proofs", "proof_artifact", convert, 15, 60),
        Step("proofs", "decode_accuracy", [*accuracy, "--out", str(out / "decode_accuracy.jsonl")], 90, 240),
        Step("proofs", "prefill_accuracy", [*prefill, "--out", str(out / "prefill_accuracy.jsonl")], 60, 180),
        Step("proofs", "soak", soak, 120, 300),
    ]


def speed_steps(out: Path) -> list[Step]:
    """Whole decode steps, their layers beside the peers', prefill's products, and single kernels."""
    python = sys.executable
    fut_run = [python, "-c", "from fut_runtime.cli import main; main()"]
    found = []
    decode = [*fut_run, "bench", "decode", "--no-peers", "--json", str(out / "decode.jsonl")]
    found += [
        Step("decode", "decode_8b", [*decode, "--shape", "8b", "--batch", "1,8,32", "--context", "1024,4096"], 30, 60),
        Step("decode", "decode_8b_long", [*decode, "--shape", "8b", "--batch", "1", "--context", "131072"], 20, 60),
        Step("decode", "decode_70b", [*decode, "--shape", "70b", "--layers", "8", "--per-layer"], 20, 60),
        Step("decode", "decode_8b_fp8", [*decode, "--shape", "8b", "--mode", "fp8", "--batch", "1,8"], 25, 60),
    ]
    peers = [*fut_run, "bench", "decode", "--peers", "--per-layer", "--layers", "8", "--json", str(out / "peers.jsonl")]
    found += [
        Step("peers", f"peers_{s}", [*peers, "--shape", s, "--batch", "1,2,4,8,16,32", "--context", "4096"], 150, 300)
        for s in ("8b", "70b")
    ]
    sanitize = [python, "benchmarks/sanitize.py", "--out", str(out / "sanitize")]
    found += [Step("sanitize", check, [*sanitize, "--tools", check], 210, 330) for check in ("memcheck", "racecheck")]
    gemm = [*fut_run, "bench", "gemm", "--json", str(out / "gemm.jsonl")]
    w8a16 = [*fut_run, "bench", "w8a16", "--json", str(out / "w8a16.jsonl")]
    found += [
        Step("prefill", "gemm_8b", [*gemm, "--shape", "8b", "--rows", "512,2048,8192"], 30, 60),
        Step("prefill", "gemm_1b", [*gemm, "--shape", "1b", "--rows", "512,2048"], 15, 40),
        Step("prefill", "gemm_70b", [*gemm, "--shape", "70b", "--rows", "512,2048"], 30, 60),
        Step("prefill", "w8a16", [*w8a16, "--tactics", "--rows", "1,16,64,512,2048,8192"], 40, 90),
        Step(
            "prefill", "w8a16_down", [*w8a16, "--size", "4096", "14336", "--tactics", "--rows", "1,16,64,2048"], 25, 60
        ),
        Step("prefill", "gemm_405b", [*gemm, "--shape", "405b", "--rows", "512,2048"], 45, 90),
    ]
    attention = [*fut_run, "bench", "attention", "--json", str(out / "prefill_attention.jsonl")]
    found += [
        Step("prefill", "attention_8b", [*attention, "--prompts", "512,2048,8192,16384,8x2048,2048+7x128"], 25, 60),
        Step("prefill", "attention_32", [*attention, "--kv-heads", "32", "--prompts", "2048,8192,16384"], 20, 60),
        Step("prefill", "attention_1b", [*attention, "--shape", "1b", "--prompts", "2048,8192"], 15, 60),
        Step("prefill", "attention_80", [*attention, "--head-dim", "80", "--prompts", "2048"], 15, 60),
        Step("prefill", "attention_96", [*attention, "--head-dim", "96", "--prompts", "2048"], 15, 60),
    ]
    prompts = [*fut_run, "bench", "prefill", "--json", str(out / "prefill.jsonl")]
    plot, whole = ["--plot", str(out / "roofline.png")], ["--first-token", "--no-peers"]
    found += [
        Step("prefill", "prefill_8b", [*prompts, "--tokens", "512,2048", *plot], 130, 240),
        Step("prefill", "prefill_8b_whole", [*prompts, "--tokens", "2048,8192", *whole], 50, 120),
        Step("prefill", "prefill_8b_packed", [*prompts, "--tokens", "2048", "--packed", "--no-bf16"], 110, 200),
        Step("prefill", "prefill_8b_long", [*prompts, "--tokens", "1024,4096,8192", "--no-bf16"], 110, 200),
        Step("prefill", "prefill_1b", [*prompts, "--shape", "1b", "--tokens", "512,2048", "--no-bf16"], 60, 150),
        Step("prefill", "prefill_70b", [*prompts, "--shape", "70b", "--tokens", "512,2048", "--no-bf16"], 80, 180),
        Step("prefill", "prefill_405b", [*prompts, "--shape", "405b", "--tokens", "512,2048", "--no-bf16"], 120, 240),
    ]
    found.append(Step("kernels", "kernel_times", [python, "benchmarks/kernel_times.py"], 20, 60))
    for name, option in (("decode_projections", "--out"), ("attention_decode", "--output"), ("sampling", "--out")):
        command = [python, f"benchmarks/{name}.py", option, str(out / f"{name}.jsonl")]
        found.append(Step("kernels", name, command, 30, 60))
    return found


def conversion_steps(out: Path) -> list[Step]:
    """Conversion of an 8B and a 70B shape, from a few layers."""
    python = sys.executable
    layers = [python, "benchmarks/calibrate_layers.py", "--out", str(out / "layers.jsonl")]
    cap = ["--shape", "70b", "--layers", "1", "2", "--device-cap-gb", "80", "--host-cap-gb", "100"]
    return [
        Step("conversion", "gptq_8b", layers, 140, 200),
        Step("conversion", "rtn_8b", [*layers, "--method", "rtn"], 50, 90),
        Step("conversion", "gptq_70b", [*layers, *cap], 240, 300),
    ]


def accuracy_steps(out: Path, model: Path, text: Path, calibration: str) -> list[Step]:
    """What formats cost, by the reference backend on the card."""
    python = sys.executable
    table = [
        python, "benchmarks/accuracy_table.py", str(model), "--text", str(text), "--calibration-text", calibration,
        "--device", "cuda", "--label", model.name, "--out", str(out / "accuracy.jsonl"), "--rows",
    ]  # fmt: skip
    cache = [
        python, "benchmarks/kv_cache_table.py", str(model), "--text", str(text), "--device", "cuda",
        "--label", model.name, "--out", str(out / "kv_cache.jsonl"), "--window", "2048", "--window", "8192",
    ]  # fmt: skip
    return [
        Step("formats", f"formats_{model.name}", [*table, "kv,fp8"], 120, 180),
        Step("accuracy", f"accuracy_{model.name}", [*table, "published,gptq,gptq-builtin"], 180, 240),
        Step("choices", f"choices_{model.name}", [*table, "head,groups"], 200, 300),
        Step("cache", f"kv_cache_{model.name}", cache, 400, 500),
    ]


def every_step() -> list[Step]:
    """All steps that there are, on no model in particular."""
    return steps(Path("OUT"), Path("MODEL"), Path("TEXT"), "builtin")


def overview() -> str:
    """Groups and steps with their expected seconds and limits, for --help; a click paragraph kept as it is."""
    known = every_step()
    lines = ["\b", "Groups, and what their steps are expected to take (and may take), in seconds:"]
    for group in dict.fromkeys(step.group for step in known):
        members = [step for step in known if step.group == group]
        lines.append(f"  {group}: {sum(step.expected_s for step in members):g}")
        lines += [f"    {step.name}: {step.expected_s:g} ({step.limit_s:g})" for step in members]
    return "\n".join(lines)


def run(step: Step, log: Path) -> str:
    """Run a step; `passed`, `failed`, `killed` or `not available`."""
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
            code = process.wait(timeout=step.limit_s)
            return {0: "passed", NOT_AVAILABLE: "not available"}.get(code, "failed")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "killed"


@click.command(epilog=overview())
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", "groups", default=DEFAULT_GROUPS, show_default=True)
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Checkpoint for proofs and accuracy.")
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="Text to score.")
@click.option("--calibration-text", default="builtin", show_default=True)
@click.option("--budget", "budget_s", type=float, default=float("inf"), help="Seconds for all steps.  [default: any]")
def main(out: Path, groups: str, model: Path | None, text: Path | None, calibration_text: str, budget_s: float) -> None:
    """Run the steps of the named groups, in the order in which the groups are named."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = steps(out, model, text, calibration_text)
    for group in groups.split(","):
        if group not in {step.group for step in every_step()}:
            raise click.BadParameter(f"there is no group {group!r}: see --help", param_hint="--steps")
        if not any(step.group == group for step in known):
            print(f"{group}: left out, it needs --model and --text", flush=True)
    summary = []
    begun = time.monotonic()
    for group in groups.split(","):
        for step in (s for s in known if s.group == group):
            started = time.monotonic()
            log = out / f"{step.name}.log"
            if started - begun + step.expected_s > budget_s:
                log.write_text(f"expected to take {step.expected_s:g} s, more than is left\n", encoding="utf-8")
                outcome = "left out"
            else:
                outcome = run(step, log)
            seconds = round(time.monotonic() - started, 1)
            summary.append({"step": step.name, "outcome": outcome, "seconds": seconds})
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            last = log.read_text("utf-8", "replace").strip().splitlines()[-6 if outcome != "passed" else -2 :]
            print(f"{step.name:28s} {outcome:13s} {seconds:7.1f} s", *last, sep="\n    ", flush=True)
    sys.exit(any(entry["outcome"] in ("failed", "killed") for entry in summary))


if __name__ == "__main__":
    main()
