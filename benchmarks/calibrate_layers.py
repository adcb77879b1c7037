#!/usr/bin/env python3
"""How fast, and in how much memory, layers of an 8B or a 70B shape are calibrated and converted on a card.

A CPU can be measured too (`--device cpu`): then `parts` are CPU seconds of all threads, which say more than the clock
where other work shares the cores.

    python benchmarks/calibrate_layers.py                                  # GPTQ of 2 and 5 layers of the 8B shape
    python benchmarks/calibrate_layers.py --method rtn
    python benchmarks/calibrate_layers.py --device cpu --shape smollm2 --windows 16 --group-size 64 --layers 1 3
    python benchmarks/calibrate_layers.py --shape 70b --layers 1 2 --device-cap-gb 80 --host-cap-gb 100

Random weights, 128 windows of 2048 random tokens, activation-weighted scales, E4M3 and INT4, E4M3 head. Layers are
alike, so the whole is extrapolated: conversions with two numbers of layers are measured, each in a process of its own,
and their difference is what the further layers cost, files included. On a card the first is run once before that,
unmeasured, so that Triton has compiled what it keeps. `parts` splits the GPTQ step, each part waited
for; what is left of the step is `forward`, the windows running through the layers but for their products and attention;
`cpu` is the whole process's. `--device-cap-gb` lets PyTorch
allocate no more, and a process that used more than `--host-cap-gb` has failed. Appends a JSON line to
results/calibrate-layers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from convert_8b_shape import CONFIG, commit, write_checkpoint  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "calibrate-layers.jsonl"
#: Keys of config.json that differ from the 8B shape's.
SHAPES: dict[str, dict[str, int]] = {
    "8b": {},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
    },
    # For trying this script out.
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def write_tokenizer_and_text(checkpoint: Path, text: Path, words: int) -> None:
    """A tokenizer with one token a word for the whole vocabulary, and a text of random words."""
    size = CONFIG["vocab_size"]
    vocab = {f"w{i}": i for i in range(size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    draw = random.Random(0)
    text.write_text(" ".join(f"w{draw.randrange(size)}" for _ in range(words)))


class Parts:
    """Seconds of the functions that GPTQ spends its time in, by part."""

    def __init__(self, device: str) -> None:
        from fut_convert import gptq_layers, sequential, sixteen_bit
        from fut_convert.quantize import gptq, whole_matrix

        self.seconds: dict[str, float] = {}
        self._cuda = device.startswith("cuda")
        self._now = time.perf_counter if self._cuda else time.process_time
        self._time(sixteen_bit.SixteenBitProjection, "accumulate", "products")
        self._time(sixteen_bit, "scaled_dot_product_attention", "attention")
        self._time(sequential, "outer_products", "hessian")
        self._time(whole_matrix, "int4_scales", "scales")
        self._time(gptq, "factorize", "factorise")
        self._time(whole_matrix, "corrected_weight", "correct")
        self._time(gptq, "solve_columns", "columns")
        self._time(gptq, "refine_codes", "refine")
        self._time(gptq, "row_errors", "errors")
        self._time(gptq_layers, "dequantize_int4", "decode")

    def _time(self, module: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._wait()
            started = self._now()
            result = function(*args, **kwargs)
            self._wait()
            self.seconds[part] = self.seconds.get(part, 0.0) + self._now() - started
            return result

        setattr(module, name, timed)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def measure_here(options: argparse.Namespace, layers: int, workdir: Path) -> dict[str, Any]:
    """Convert a checkpoint of `layers` layers in this process and return what it took."""
    from fut_convert import convert

    if options.device_cap_gb and options.device.startswith("cuda"):
        total = torch.cuda.get_device_properties(options.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.device_cap_gb * 1e9 / total))
    parts = Parts(options.device)
    started, cpu_started = time.perf_counter(), time.process_time()
    result = convert(
        str(workdir / f"checkpoint-{layers}"),
        workdir / f"artifact-{layers}",
        overrides={
            "head": "e4m3",
            "int4.method": options.method,
            "int4.scale_method": options.scale_method,
            "int4.group_size": options.group_size,
            "calibration.text": str(workdir / "text.txt"),
            "calibration.windows": options.windows,
            "calibration.allow_few_tokens": True,
        },
        device=options.device,
        device_memory=options.device_cap_gb,
        host_memory=options.host_cap_gb,
        report=options.report,
    )
    memory = result.plan.memory
    seconds = time.perf_counter() - started
    if "gptq" in result.step_seconds and not options.device.startswith("cpu"):
        parts.seconds["forward"] = result.step_seconds["gptq"] - sum(parts.seconds.values())
    parts.seconds["cpu"] = time.process_time() - cpu_started
    reserved = torch.cuda.max_memory_reserved() if options.device.startswith("cuda") else None
    return {
        "layers": layers,
        "seconds": round(seconds, 2),
        "step_seconds": {k: round(v, 3) for k, v in result.step_seconds.items()},
        "parts": {k: round(v, 3) for k, v in parts.seconds.items()},
        "activations": memory.place,
        "peak_device_bytes": result.peak_device_bytes,
        "predicted_device_bytes": memory.device_bytes,
        "predicted_steps": memory.device_steps,
        "reserved_device_bytes": reserved,
        "peak_host_bytes": result.peak_memory_bytes,
        "predicted_host_bytes": memory.host_bytes,
    }


def measure(options: argparse.Namespace, layers: int, workdir: Path) -> dict[str, Any]:
    """The same in a process of its own."""
    checkpoint = workdir / f"checkpoint-{layers}"
    if not checkpoint.exists():
        write_checkpoint(checkpoint, layers, CONFIG | SHAPES[options.shape])
        write_tokenizer_and_text(checkpoint, workdir / "text.txt", options.windows * 2048 + 1)
    shutil.rmtree(workdir / f"artifact-{layers}", ignore_errors=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--child", str(layers), str(workdir)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    if options.host_cap_gb and result["peak_host_bytes"] > options.host_cap_gb * 1e9:
        raise SystemExit(f"{result['peak_host_bytes'] / 1e9:.1f} GB of host memory, {options.host_cap_gb} were allowed")
    return result


def a_layer(few: dict[str, float], many: dict[str, float], layers: int) -> dict[str, float]:
    """What each step of a further layer takes."""
    return {k: round((many[k] - few.get(k, 0.0)) / layers, 3) for k in many}


def main() -> None:
    """Measure two depths and extrapolate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 5), help="the two depths measured")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--method", choices=("gptq", "rtn"), default="gptq")
    parser.add_argument("--scale-method", default="weighted_search")
    parser.add_argument("--group-size", type=lambda x: x if x == "auto" else int(x), default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--device-cap-gb", type=float)
    parser.add_argument("--host-cap-gb", type=float)
    parser.add_argument("--report", action="store_true", help="let the conversion write its report as well")
    parser.add_argument("--workdir", type=Path, help="where checkpoints and artifacts go; the system's place for them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_here(options, int(options.child[0]), Path(options.child[1]))))
        return
    with tempfile.TemporaryDirectory(dir=options.workdir) as directory:
        if options.device.startswith("cuda"):
            measure(options, options.layers[0], Path(directory))
        few, many = (measure(options, n, Path(directory)) for n in options.layers)
    further = many["layers"] - few["layers"]
    whole_layers = (CONFIG | SHAPES[options.shape])["num_hidden_layers"]
    seconds = (many["seconds"] - few["seconds"]) / further
    predicted, measured = many["predicted_device_bytes"], many["peak_device_bytes"]
    line = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU",
        "shape": options.shape,
        "method": options.method,
        "scale_method": options.scale_method,
        "windows": options.windows,
        "report": options.report,
        "device_cap_gb": options.device_cap_gb,
        "host_cap_gb": options.host_cap_gb,
        "runs": [few, many],
        "seconds_a_layer": round(seconds, 3),
        "steps_a_layer": a_layer(few["step_seconds"], many["step_seconds"], further),
        "parts_a_layer": a_layer(few["parts"], many["parts"], further),
        "seconds_extrapolated": round(few["seconds"] + seconds * (whole_layers - few["layers"]), 1),
        "layers_extrapolated": whole_layers,
        "device_measured_over_predicted": round(measured / predicted, 3) if measured and predicted else None,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=2))


if __name__ == "__main__":
    main()
