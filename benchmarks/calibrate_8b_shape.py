#!/usr/bin/env python3
"""How fast, and in how much device memory, an 8B shape is calibrated and converted on a card.

    python benchmarks/calibrate_8b_shape.py --layers 4 --device cuda

Random weights, 128 windows of 2048 random tokens, activation-weighted search, E4M3 and INT4, E4M3 head. Layers are
alike, so the whole is extrapolated from the layers' share of the time: conversions with two numbers of layers are
measured and their difference is what the further layers cost. Appends a JSON line to results/calibrate-8b-shape.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from convert_8b_shape import CONFIG, commit, write_checkpoint  # noqa: E402

from fut_convert import convert  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "calibrate-8b-shape.jsonl"


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


def measure(layers: int, windows: int, scale_method: str, device: str, workdir: Path) -> dict[str, Any]:
    """Convert a checkpoint of `layers` layers and return what it took."""
    checkpoint, text = workdir / f"checkpoint-{layers}", workdir / "text.txt"
    write_checkpoint(checkpoint, layers)
    write_tokenizer_and_text(checkpoint, text, windows * 2048 + 1)
    started = time.perf_counter()
    result = convert(
        str(checkpoint),
        workdir / f"artifact-{layers}",
        overrides={
            "head": "e4m3",
            "int4.scale_method": scale_method,
            "calibration.text": str(text),
            "calibration.windows": windows,
        },
        device=device,
    )
    return {
        "layers": layers,
        "seconds": round(time.perf_counter() - started, 2),
        "step_seconds": {k: round(v, 2) for k, v in result.step_seconds.items()},
        "peak_device_bytes": result.peak_device_bytes,
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def main() -> None:
    """Measure two depths and extrapolate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 5), help="the two depths measured")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--scale-method", default="weighted_search")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = [
            measure(n, options.windows, options.scale_method, options.device, Path(directory)) for n in options.layers
        ]
    few, many = runs
    a_layer = (many["seconds"] - few["seconds"]) / (many["layers"] - few["layers"])
    whole = few["seconds"] + a_layer * (CONFIG["num_hidden_layers"] - few["layers"])
    line = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU",
        "scale_method": options.scale_method,
        "windows": options.windows,
        "runs": runs,
        "seconds_a_layer": round(a_layer, 3),
        "seconds_32_layers_extrapolated": round(whole, 1),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=2))


if __name__ == "__main__":
    main()
