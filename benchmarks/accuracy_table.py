#!/usr/bin/env python3
"""Perplexity of a model in every storage and arithmetic of the artifact: the tables of docs/accuracy.md.

    python benchmarks/accuracy_table.py MODEL --text wiki.test.raw --calibration-text wiki.valid.tokens \\
        --device cuda --label smollm2

Converts MODEL (a checkpoint directory or .gguf file) with several recipes, scores the text by windows of 2048 tokens
against the checkpoint in FP32, prints a table, and appends one JSON line a row to benchmarks/results/accuracy.jsonl.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from fut_convert import convert  # noqa: E402
from fut_convert.checkpoint_model import model_from_checkpoint  # noqa: E402
from fut_convert.sources import open_source  # noqa: E402
from fut_runtime.artifact.manifest import KVCacheSpec  # noqa: E402
from fut_runtime.artifact.reader import Artifact  # noqa: E402
from fut_runtime.bench.machine import source_commit  # noqa: E402
from fut_runtime.evaluate.perplexity import evaluate_perplexity  # noqa: E402
from fut_runtime.evaluate.runner import ReferenceRunner, WindowRunner  # noqa: E402
from fut_runtime.evaluate.windows import cut_windows  # noqa: E402
from fut_runtime.reference import backend as reference  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "accuracy.jsonl"
#: Smaller groups where the report's errors are largest, in the order of what they add to the artifact.
MIXED_GROUPS: list[dict[str, int]] = [{"o": 32}, {"down": 32}, {"o": 32, "down": 32}, {"qkv": 32, "o": 32}]


class Remembered:
    """A runner that keeps what it computed: the baseline is scored against every row."""

    def __init__(self, runner: WindowRunner) -> None:
        self._runner = runner
        self._hidden: dict[bytes, Tensor] = {}

    def hidden(self, tokens: Tensor) -> Tensor:
        key = tokens.cpu().numpy().tobytes()
        if key not in self._hidden:
            self._hidden[key] = self._runner.hidden(tokens)
        return self._hidden[key]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._runner.logits(hidden)


class Table:
    """Scores rows and writes them down."""

    def __init__(self, label: str, windows: Tensor, baseline: WindowRunner, facts: dict[str, Any], out: Path) -> None:
        self.label, self.windows, self.baseline, self.facts, self.out = label, windows, baseline, facts, out

    def row(self, name: str, runner: WindowRunner, **settings: Any) -> None:
        started = time.monotonic()
        result = evaluate_perplexity(runner, self.windows, baseline=self.baseline)
        line = {
            "model": self.label, "row": name, "perplexity": round(result.perplexity, 4), **settings,
            "windows": result.windows, "window_tokens": result.window_tokens,
        }  # fmt: skip
        if result.kl and result.top1 and result.nll_difference:
            line |= {
                "kl": round(result.kl.mean, 5), "kl_se": round(result.kl.standard_error, 5),
                "top1": round(result.top1.mean, 5), "top1_se": round(result.top1.standard_error, 5),
                "nll_difference": round(result.nll_difference.mean, 5),
                "nll_difference_se": round(result.nll_difference.standard_error, 5),
            }  # fmt: skip
        if isinstance(runner, ReferenceRunner) and runner.quantized:
            line["saturated_share"] = runner.saturated / runner.quantized
        line |= {"seconds": round(time.monotonic() - started, 1), **self.facts}
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{self.label:12s} {name:58s} {line['perplexity']:9.3f}  KL {line.get('kl', 0):.4f}  "
            f"top-1 {100 * line.get('top1', 1):.2f} %  ({line['seconds']} s)",
            flush=True,
        )


@click.command()
@click.argument("model")
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--calibration-text", default="builtin", show_default=True, help="File, or builtin.")
@click.option("--label", required=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--group-size", default=64, show_default=True)
@click.option("--max-windows", type=int)
@click.option(
    "--rows",
    default="all",
    show_default=True,
    help="all, or some: rtn,absmax_7,absmax_7.5,search,folded,gptq,published,builtin,gptq-builtin,fold-v,head,groups,"
    "kv,fp8,serve.",
)
@click.option("--gptq", "changed", type=(str, float), multiple=True, help="Recipe key and number for the GPTQ rows.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(
    model: str, text: Path, calibration_text: str, label: str, device: str, group_size: int, max_windows: int | None,
    rows: str, changed: tuple[tuple[str, float], ...], out: Path,
) -> None:  # fmt: skip
    """Measure the table for MODEL."""
    wanted = None if rows == "all" else set(rows.split(","))
    torch.backends.cuda.matmul.allow_tf32 = False
    out.parent.mkdir(parents=True, exist_ok=True)
    with open_source(model) as source:
        checkpoint = model_from_checkpoint(source, device=device)
        tokenizer = next(c for n, c in source.side_files() if n == "tokenizer.json")
    data = tokenizer if isinstance(tokenizer, bytes) else tokenizer.read_bytes()
    windows = cut_windows(Tokenizer.from_str(data.decode()).encode(text.read_text("utf-8")).ids, 2048, max_windows)
    baseline = Remembered(ReferenceRunner(checkpoint, "prefill"))
    facts = {
        "text": text.name,
        "device": _device_name(device),
        "commit": source_commit() or "unknown",
        "date": str(datetime.date.today()),
    }
    table = Table(label, windows, baseline, facts, out)
    base = {"int4.group_size": group_size}
    calibrated = base | {"calibration.text": calibration_text, "activation.margin": 1.25}

    def include(group: str) -> bool:
        return wanted is None or group in wanted

    with _no_gradients():
        table.row("BF16 weights, FP32 compute", ReferenceRunner(checkpoint, "prefill"))
        for method in ("absmax_7", "absmax_7.5", "search"):
            for gain in ("runtime", "folded"):
                if not (include("folded") if gain == "folded" else include("rtn") or include(method)):
                    continue
                options = base | {"calibration.enabled": False, "int4.scale_method": method, "weights": ["int4"]}
                with _converted(model, options | {"int4.gain": gain}, device) as artifact:
                    name = f"RTN {method}" + (", gain folded" if gain == "folded" else "")
                    table.row(name, _runner(artifact, device, kv_cache="bf16"))
        if include("rtn"):
            options = calibrated | {"weights": ["int4"], "int4.gain": "folded"}
            with _converted(model, options, device) as artifact:
                table.row("RTN weighted_search, gain folded", _runner(artifact, device, kv_cache="bf16"))
        gptq = calibrated | {"weights": ["int4"], "int4.method": "gptq"} | dict(changed)
        if include("published"):
            with _converted(model, gptq | {"gptq.correction": 0, "gptq.sweeps": 0}, device) as artifact:
                table.row("GPTQ as published", _runner(artifact, device, kv_cache="bf16"))
        if include("gptq"):
            with _converted(model, gptq, device) as artifact:
                table.row("GPTQ", _runner(artifact, device, kv_cache="bf16"))
                table.row("GPTQ + INT4 cache", _runner(artifact, device))
        if include("fold-v"):
            for name, options in (("RTN weighted_search", calibrated | {"weights": ["int4"]}), ("GPTQ", gptq)):
                with _converted(model, options | {"kv_cache.fold_v": True}, device) as artifact:
                    table.row(f"{name}, V's rotation folded", _runner(artifact, device, kv_cache="bf16"))
                    table.row(f"{name}, V's rotation folded + INT4 cache", _runner(artifact, device))
        if include("head"):
            for head in ("e4m3", "int4"):
                with _converted(model, calibrated | {"weights": ["int4", "bf16"], "head": head}, device) as artifact:
                    runner = _runner(artifact, device, decode_mode="bf16", kv_cache="bf16")
                    table.row(f"head in {head.upper()} alone", runner)
        if include("groups"):
            for overrides in MIXED_GROUPS:
                name = ", ".join(f"{module} {size}" for module, size in overrides.items())
                with _converted(model, gptq | {"int4.group_size_overrides": overrides}, device) as artifact:
                    table.row(f"GPTQ, groups of {name}, else {group_size}", _runner(artifact, device, kv_cache="bf16"))
        if include("gptq-builtin"):
            with _converted(model, gptq | {"calibration.text": "builtin"}, device) as artifact:
                table.row("GPTQ, built-in text", _runner(artifact, device, kv_cache="bf16"))
        if include("builtin"):
            options = base | {"weights": ["int4"], "calibration.text": "builtin"}
            with _converted(model, options, device) as artifact:
                table.row("RTN weighted_search, built-in text", _runner(artifact, device, kv_cache="bf16"))
        if not any(include(group) for group in ("rtn", "kv", "fp8", "serve")):
            return
        options = calibrated | {"weights": ["e4m3", "int4", "bf16"]}
        with _converted(model, options, device) as artifact:
            if include("rtn"):
                table.row("RTN weighted_search", _runner(artifact, device, kv_cache="bf16"))
                table.row("RTN weighted_search + INT4 cache", _runner(artifact, device))
            if include("kv"):
                plain = _runner(artifact, device, decode_mode="bf16")
                for rotation in (False, True):
                    for zero_point in (False, True):
                        cache = KVCacheSpec(4, rotation, zero_point)
                        name = ("zero point" if zero_point else "symmetric") + (", rotated" if rotation else "")
                        table.row(
                            f"INT4 cache alone: {name}", replace(plain, model=replace(plain.model, kv_cache=cache))
                        )
            if include("fp8"):
                table.row("E4M3 weights alone (W8A16)", _runner(artifact, device, decode_mode="fp8", kv_cache="bf16"))
                for mode in ("request", "delayed", "frozen"):
                    runner = _runner(artifact, device, protocol="prefill", scale_mode=mode, compute="exact")
                    table.row(f"FP8 prefill, {mode} scales", runner, compute="exact")
            if include("serve"):
                for prefill in ("e4m3", "bf16"):
                    for decode in ("int4", "fp8", "bf16"):
                        runner = _runner(
                            artifact,
                            device,
                            protocol="serve",
                            compute="exact",
                            prefill_mode=prefill,
                            decode_mode=decode,
                        )
                        table.row(f"serve: {prefill} prefill, {decode} decode, INT4 cache", runner, compute="exact")
                runner = _runner(artifact, device, compute="exact")
                table.row("decode: INT4 weights and cache", runner, compute="exact")


def _runner(
    artifact: Artifact, device: str, *, protocol: str = "decode", scale_mode: str = "request", compute: str = "fp32",
    **modes: Any,
) -> ReferenceRunner:  # fmt: skip
    if protocol == "decode" and "e4m3" not in artifact.manifest.weights["layers.0.qkv"]:
        modes["prefill_mode"] = "decode"
    loaded = reference.load(artifact, device=device, scale_mode=scale_mode, compute=compute, **modes)
    return ReferenceRunner(loaded.model, protocol, loaded.new_scales, keep_scales=scale_mode == "delayed")


@contextmanager
def _converted(model: str, options: dict[str, Any], device: str) -> Iterator[Artifact]:
    with tempfile.TemporaryDirectory() as directory:
        started = time.monotonic()
        result = convert(model, Path(directory) / "artifact", overrides=options, device=device)
        steps = {k: round(v, 1) for k, v in result.step_seconds.items()}
        print(f"converted in {time.monotonic() - started:.1f} s {steps}", flush=True)
        yield Artifact.open(result.path)


@contextmanager
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


if __name__ == "__main__":
    main()
