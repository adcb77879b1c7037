"""Microseconds that choosing tokens takes on the card, launches in a graph one after another; a JSON line a case.

python benchmarks/sampling.py --out benchmarks/results/sampling.jsonl
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from fut_runtime.backend import Draw  # noqa: E402
from fut_runtime.bench.machine import machine_facts  # noqa: E402
from fut_runtime.bench.timing import interval_ms  # noqa: E402
from fut_runtime.cuda.decoder import sampling_struct  # noqa: E402
from fut_runtime.cuda.library import library  # noqa: E402
from fut_runtime.cuda.structs import Sampling  # noqa: E402

VOCAB = 128256
ROWS = (1, 2, 4, 8, 16, 32, 64)
LAUNCHES = 20
DRAWS = {
    "greedy": Draw(),
    "temperature": Draw(temperature=0.8),
    "top_k 50": Draw(temperature=0.8, top_k=50),
    "top_p 0.9": Draw(temperature=0.8, top_p=0.9),
    "top_k 50, top_p 0.9": Draw(temperature=0.8, top_k=50, top_p=0.9),
    "top_k 2000, top_p 0.9, min_p 0.02": Draw(temperature=0.8, top_k=2000, top_p=0.9, min_p=0.02),
    "temperature 2, top_p 0.95": Draw(temperature=2.0, top_p=0.95),
}


def logits_like(kind: str) -> Tensor:
    """F32 [64, VOCAB]: `random weights` gives normal logits, `a few likely` what a trained model gives."""
    generator = torch.Generator("cuda").manual_seed(1)
    normal = torch.randn(max(ROWS), VOCAB, device="cuda", generator=generator)
    if kind == "random weights":
        return normal
    likely = torch.rand(max(ROWS), VOCAB, device="cuda", generator=generator) < 3e-4
    return 2.5 * normal + 10.0 * likely


def time_us(logits: Tensor, draw: Draw, rows: int) -> float:
    """Microseconds of one launch."""
    numbers = torch.rand(rows, dtype=torch.float64).tolist()
    listed = (Sampling * rows)(*(sampling_struct(draw) for _ in range(rows)))
    for structure, number in zip(listed, numbers, strict=True):
        structure.uniform = number
    parameters = torch.frombuffer(bytearray(bytes(listed)), dtype=torch.uint8).cuda()
    tokens = torch.empty(rows, dtype=torch.int32, device="cuda")

    def launch() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (logits.data_ptr(), parameters.data_ptr(), tokens.data_ptr())
        library().call("fut_sample", *pointers, rows, VOCAB, None, 0, stream)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    return interval_ms(graph.replay, repeats=20, warm_up=3) / LAUNCHES * 1e3


def main() -> None:
    """Print a line a case, and append it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts = machine_facts(torch.device("cuda"))
    for kind in ("random weights", "a few likely"):
        logits = logits_like(kind)
        for rows in ROWS:
            us = {name: round(time_us(logits, draw, rows), 2) for name, draw in DRAWS.items()}
            line = json.dumps({"bench": "sampling", "logits": kind, "vocab": VOCAB, "rows": rows, "us": us, **facts})
            print(line)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
