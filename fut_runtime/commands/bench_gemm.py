"""`fut-run bench gemm`: the matrix products of prompts beside PyTorch's, in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fut_runtime.commands.bench_setup import append_line, card_and_facts, json_option, named_shape
from fut_runtime.commands.options import numbers

if TYPE_CHECKING:
    from fut_runtime.bench.gemm import GemmResult

_TABLE_WIDTH = 150


@click.command(short_help="Time matrix products of prompts.")
@click.option("--shape", default="8b", show_default=True, metavar="1b|8b|70b|405b", help="The sizes of a Llama.")
@click.option(
    "--rows",
    callback=numbers,
    default="512,2048,8192",
    show_default=True,
    metavar="M,…",
    help="Tokens that are multiplied together.",
)
@json_option("product")
def gemm(shape: str, rows: list[int], json_file: Path | None) -> None:
    """Time the four products of a layer with many rows, in E4M3 and in BF16, and PyTorch's for the same matrices.

    Random data; as many copies of the weights as fill the L2 several times; CUDA graphs that take turns. PyTorch's are
    torch._scaled_mm with fast accumulation and torch.matmul.

    \b
    Examples:
      fut-run bench gemm --shape 8b --rows 512,2048
      fut-run bench gemm --shape 405b --rows 2048 --json results.jsonl
    """
    from fut_runtime.bench.gemm import measure

    name, model = named_shape(shape)
    device, facts = card_and_facts()
    results = []
    for result in measure(model, rows, device):
        results.append(result)
        append_line(json_file, {"bench": "gemm", "shape": name, **result.to_json(), **facts})
    print_table(name, str(facts["card"]), results)


def print_table(shape: str, card: str, results: Sequence[GemmResult]) -> None:
    """Microseconds, 10¹² operations a second, and how many times faster than the peer."""
    from rich.console import Console
    from rich.table import Table

    from fut_runtime.bench.gemm import PEERS

    console = Console(highlight=False, width=_TABLE_WIDTH)
    console.print(f"{shape}, one layer; {card}; µs, then Tflop/s and how many times faster than PyTorch")
    table = Table(box=None, pad_edge=False)
    for column in ("module", "rows", *results[0].us):
        table.add_column(column, justify="right")
    for name in PEERS:
        table.add_column(name.removeprefix("fut_"), justify="right")
        table.add_column("× torch", justify="right")
    for r in results:
        cells = [r.module, str(r.m), *(f"{us:.1f}" for us in r.us.values())]
        for name in PEERS:
            cells += [f"{r.teraflops(name):.0f}", f"{r.ratio(name):.2f}"]
        table.add_row(*cells)
    console.print(table)
