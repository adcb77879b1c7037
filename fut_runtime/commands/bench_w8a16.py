"""`fut-run bench w8a16`: E4M3 weights with 16-bit activations, beside PyTorch's ways, in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fut_runtime.commands.bench_setup import append_line, card_and_facts, json_option
from fut_runtime.commands.options import numbers

if TYPE_CHECKING:
    from fut_runtime.bench.w8a16 import W8A16Result

_TABLE_WIDTH = 150


@click.command(short_help="Time products of E4M3 weights with 16-bit activations.")
@click.option(
    "--size", "sizes", type=(int, int), multiple=True, default=[(28672, 4096)], show_default=True, metavar="N K",
    help="Output channels and inputs of the weights; may be repeated.",
)  # fmt: skip
@click.option(
    "--rows", callback=numbers, default="1,16,64,2048,8192", show_default=True, metavar="M,…",
    help="Tokens that are multiplied together.",
)  # fmt: skip
@click.option("--tactics", is_flag=True, help="Time every tile and several splits, too.")
@json_option("product")
def w8a16(sizes: Sequence[tuple[int, int]], rows: list[int], tactics: bool, json_file: Path | None) -> None:
    """Time mm_bf16_fp8: BF16 activations times E4M3 weights that are widened in registers.

    Beside it, PyTorch with weights cast to BF16 before each product, and with weights that are in BF16 already. Random
    data; as many copies of the weights as fill the L2 several times; CUDA graphs that take turns. The share of the read
    bandwidth counts the weights' bytes and is measured in the same run.

    \b
    Examples:
      fut-run bench w8a16 --rows 1,2,4,8,16,32,64
      fut-run bench w8a16 --size 4096 14336 --rows 1,2048 --tactics --json results.jsonl
    """
    from fut_runtime.bench.timing import read_bandwidth
    from fut_runtime.bench.w8a16 import measure
    from fut_runtime.errors import FutError

    if any(min(size) < 1 for size in sizes):
        raise FutError(f"--size is {list(sizes)}, expected whole numbers of at least 1")
    device, facts = card_and_facts()
    bandwidth = read_bandwidth(device)
    facts["read_GB_per_s"] = round(bandwidth / 1e9)
    results = []
    for result in measure(sizes, rows, device, bandwidth, tactics=tactics):
        results.append(result)
        append_line(json_file, {"bench": "w8a16", **result.to_json(), **facts})
    print_table(str(facts["card"]), bandwidth, results)


def print_table(card: str, bandwidth: float, results: Sequence[W8A16Result]) -> None:
    """Microseconds, how many times faster than PyTorch's ways, and the share of the read bandwidth."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=_TABLE_WIDTH)
    console.print(f"E4M3 weights, BF16 activations; {card}, reads {bandwidth / 1e9:.0f} GB/s; µs")
    table = Table(box=None, pad_edge=False)
    for column in ("rows", "n", "k", *results[0].us, "× cast", "× bf16", "of read", "tile", "host"):
        table.add_column(column, justify="right")
    for r in results:
        times = [f"{us:.1f}" for us in r.us.values()]
        ratios = [f"{r.us[name] / r.us['fut']:.2f}" for name in ("cast", "bf16")]
        share = f"{100 * r.read_share:.0f} %"
        table.add_row(str(r.m), str(r.n), str(r.k), *times, *ratios, share, r.tile, f"{r.host_us:.1f}")
    console.print(table)
    for r in results:
        if r.tactics:
            best = sorted(r.tactics.items(), key=lambda item: item[1])[:5]
            console.print(f"{r.m} × {r.n} × {r.k}: " + ", ".join(f"{name} {us:.1f}" for name, us in best))
