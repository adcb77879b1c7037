#!/usr/bin/env python3
"""Decode's four matrix products of a layer on a card, one by one and as the chain that a layer is.

    python benchmarks/decode_projections.py --shape 8b --tokens 1,8,16,32 --formats int4,e4m3,bf16 --out FILE

Random weights, enough copies that none is in the L2 when its turn comes, captured in a graph and launched as in a step
(with programmatic dependent launch). Microseconds are medians of replays over the number of products; bytes are weights
and scales. Attention is not in the chain.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from fut_runtime.artifact.layout import padded_e4m3_shape, padded_int4_shape  # noqa: E402
from fut_runtime.artifact.manifest import WeightSpec  # noqa: E402
from fut_runtime.artifact.orders import DEFAULT_NIBBLE_ORDER, DEFAULT_SCALE_ORDER  # noqa: E402
from fut_runtime.cuda.operations import DeviceMatrix, project  # noqa: E402
from fut_runtime.cuda.structs import Epilogue  # noqa: E402

#: Hidden size, rows of qkv, columns of o, intermediate size.
SHAPES = {"1b": (2048, 3072, 2048, 8192), "8b": (4096, 6144, 4096, 14336), "70b": (8192, 10240, 8192, 28672)}
EPILOGUES = {"qkv": Epilogue.STORE, "o": Epilogue.RESIDUAL, "gate_up": Epilogue.SWIGLU, "down": Epilogue.RESIDUAL}
COPIES = 8


def random_matrix(weight_format: str, rows: int, cols: int, group: int, paired: bool) -> DeviceMatrix:
    """Random bits where every bit pattern is a number, small values elsewhere."""
    if weight_format == "int4":
        padded = padded_int4_shape((rows, cols), group, paired)
        words = torch.randint(-(2**31), 2**31 - 1, (padded[0] // 16, padded[1] // 64, 32, 4), device="cuda")
        scale = torch.rand(padded[0] // 16, padded[1] // group, 16, device="cuda").mul_(0.01).to(torch.bfloat16)
        order = "interleave8" if paired else "natural"
        facts = ("none", group, "bfloat16", DEFAULT_NIBBLE_ORDER, DEFAULT_SCALE_ORDER)
        return DeviceMatrix(WeightSpec("int4", (rows, cols), padded, order, *facts), words.to(torch.int32), scale)
    padded = padded_e4m3_shape((rows, cols))
    order = "interleave1" if paired else "natural"
    weight = torch.randn(padded, device="cuda").mul_(0.02)
    if weight_format == "bf16":
        return DeviceMatrix(WeightSpec("bf16", (rows, cols), padded, order, "none"), weight.to(torch.bfloat16))
    spec = WeightSpec("e4m3", (rows, cols), padded, order, "none", scale_dtype="float32")
    scale = torch.rand(padded[0], device="cuda")
    return DeviceMatrix(spec, weight.mul_(1000).clamp_(-448, 448).to(torch.float8_e4m3fn), scale)


def stored_bytes(matrix: DeviceMatrix) -> int:
    return sum(t.numel() * t.element_size() for t in (matrix.weight, matrix.scale) if t is not None)


def replay_us(work: Callable[[], object], repeats: int = 20) -> float:
    """Median microseconds of a captured piece of work."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def launch(
    matrices: dict[str, list[DeviceMatrix]], x: dict[str, torch.Tensor], h: torch.Tensor, name: str, copy: int
) -> None:
    """One product of a layer."""
    project(matrices[name][copy], x[name], EPILOGUES[name], y=h)


def repeat(one: Callable[[str, int], None], names: list[str]) -> None:
    """The named products, with every copy of their weights."""
    for copy in range(COPIES):
        for name in names:
            one(name, copy)


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b", show_default=True)
@click.option("--tokens", default="1,8,16,32", show_default=True)
@click.option("--formats", default="int4,e4m3,bf16", show_default=True)
@click.option("--group-size", default=128, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Append JSON lines.")
def main(shape: str, tokens: str, formats: str, group_size: int, out: Path | None) -> None:
    """Time the products of one layer."""
    hidden, qkv, attended, intermediate = SHAPES[shape]
    sizes = {
        "qkv": (qkv, hidden), "o": (hidden, attended),
        "gate_up": (2 * intermediate, hidden), "down": (hidden, intermediate),
    }  # fmt: skip
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    for weight_format in formats.split(","):
        matrices = {
            name: [random_matrix(weight_format, *size, group_size, name == "gate_up") for _ in range(COPIES)]
            for name, size in sizes.items()
        }
        for count in map(int, tokens.split(",")):
            x = {n: torch.randn(count, cols, device="cuda").to(torch.bfloat16) for n, (_, cols) in sizes.items()}
            h = torch.randn(count, hidden, device="cuda").to(torch.bfloat16)

            one = partial(launch, matrices, x, h)
            us = {name: replay_us(partial(repeat, one, [name])) / COPIES for name in sizes}
            chain = replay_us(partial(repeat, one, list(sizes))) / COPIES
            read = sum(stored_bytes(m[0]) for m in matrices.values())
            line = {
                "benchmark": "decode_projections", "shape": shape, "format": weight_format, "tokens": count,
                "us": {n: round(v, 2) for n, v in us.items()}, "layer_us": round(chain, 2),
                "layer_terabytes_per_second": round(read / chain / 1e6, 3), "device": torch.cuda.get_device_name(),
                "commit": commit.stdout.strip() or "unknown",
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
