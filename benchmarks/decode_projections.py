#!/usr/bin/env python3
"""Decode's four matrix products of a layer on a card, one by one and as the chain that a layer is.

    python benchmarks/decode_projections.py --shape 8b --tokens 1,8,16,32 --formats int4,e4m3,bf16 --out FILE

Random weights, enough copies that none is in the L2 when its turn comes, captured in a graph and launched as in a step
(with programmatic dependent launch). Microseconds are medians of replays over the number of products; bytes are weights
and scales. Attention is not in the chain.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from fut_runtime.artifact.layout import weight_tensors  # noqa: E402
from fut_runtime.artifact.manifest import KVCacheSpec, Manifest  # noqa: E402
from fut_runtime.artifact.shards import TORCH_DTYPES  # noqa: E402
from fut_runtime.artifact.spec import MODULES  # noqa: E402
from fut_runtime.bench.machine import machine_facts  # noqa: E402
from fut_runtime.bench.random_tensors import fill_weights  # noqa: E402
from fut_runtime.bench.shapes import SHAPES, manifest_of  # noqa: E402
from fut_runtime.bench.timing import replay_us  # noqa: E402
from fut_runtime.cuda.operations import DeviceMatrix, project  # noqa: E402
from fut_runtime.cuda.structs import Epilogue  # noqa: E402

EPILOGUES = {"qkv": Epilogue.STORE, "o": Epilogue.RESIDUAL, "gate_up": Epilogue.SWIGLU, "down": Epilogue.RESIDUAL}
#: Of each matrix: more than the L2 holds.
COPIES = 8
#: How often a graph goes through them: starting one took 36 µs on one machine, a quarter of a microsecond a product so.
ROUNDS = 16


def random_matrices(manifest: Manifest, module: str, weight_format: str) -> list[DeviceMatrix]:
    """COPIES of a layer's module with random contents, stored as an artifact stores them."""
    name = f"layers.0.{module}"
    spec = manifest.weights[name][weight_format]
    generator = torch.Generator("cuda").manual_seed(0)
    found = []
    for _ in range(COPIES):
        tensors = {
            t.name: torch.empty(t.shape, dtype=TORCH_DTYPES[t.dtype], device="cuda") for t in weight_tensors(name, spec)
        }
        fill_weights(tensors, manifest, generator)
        found.append(DeviceMatrix(spec, *tensors.values()))
    return found


def stored_bytes(matrix: DeviceMatrix) -> int:
    return sum(t.numel() * t.element_size() for t in (matrix.weight, matrix.scale) if t is not None)


def launch(
    matrices: dict[str, list[DeviceMatrix]], x: dict[str, torch.Tensor], h: torch.Tensor, name: str, copy: int
) -> None:
    """One product of a layer."""
    project(matrices[name][copy], x[name], EPILOGUES[name], y=h)


def repeat(one: Callable[[str, int], None], names: list[str]) -> None:
    """The named products, with every copy of their weights, ROUNDS times."""
    for turn in range(ROUNDS * COPIES):
        for name in names:
            one(name, turn % COPIES)


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b", show_default=True)
@click.option("--tokens", default="1,8,16,32", show_default=True)
@click.option("--formats", default="int4,e4m3,bf16", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Append JSON lines.")
def main(shape: str, tokens: str, formats: str, out: Path | None) -> None:
    """Time the products of one layer."""
    sizes = {module: SHAPES[shape].module_shape(module) for module in MODULES}
    hidden = SHAPES[shape].hidden_size
    facts = machine_facts(torch.device("cuda"))
    for weight_format in formats.split(","):
        manifest = manifest_of(SHAPES[shape], weight_format, KVCacheSpec())
        matrices = {module: random_matrices(manifest, module, weight_format) for module in MODULES}
        for count in map(int, tokens.split(",")):
            x = {n: torch.randn(count, cols, device="cuda").to(torch.bfloat16) for n, (_, cols) in sizes.items()}
            h = torch.randn(count, hidden, device="cuda").to(torch.bfloat16)

            one = partial(launch, matrices, x, h)
            us = {name: replay_us(partial(repeat, one, [name]), repeats=9) / (ROUNDS * COPIES) for name in sizes}
            chain = replay_us(partial(repeat, one, list(sizes)), repeats=9) / (ROUNDS * COPIES)
            read = sum(stored_bytes(m[0]) for m in matrices.values())
            line = {
                "benchmark": "decode_projections", "shape": shape, "format": weight_format, "tokens": count,
                "us": {n: round(v, 2) for n, v in us.items()}, "layer_us": round(chain, 2),
                "layer_terabytes_per_second": round(read / chain / 1e6, 3), **facts,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
