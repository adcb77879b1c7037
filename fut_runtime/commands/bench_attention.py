"""`fut-run bench attention`: attention of prompts beside PyTorch's, in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fut_runtime.commands.bench_setup import append_line, card_and_facts, json_option, named_shape

if TYPE_CHECKING:
    from fut_runtime.bench.attention import AttentionResult

_TABLE_WIDTH = 150


@click.command(short_help="Time attention of prompts.")
@click.option("--shape", default="8b", show_default=True, metavar="1b|8b|70b|405b", help="The heads of a Llama.")
@click.option("--kv-heads", type=click.IntRange(1), metavar="N", help="Another number of KV heads.  [default: its own]")
@click.option("--head-dim", type=click.Choice(["64", "80", "96", "128"]), help="Another size.  [default: its own]")
@click.option(
    "--prompts",
    default="2048,8192,8x2048,2048+7x128",
    show_default=True,
    metavar="CASE,…",
    help="Tokens of a prompt, or of those of a batch.",
)
@json_option("case")
def attention(shape: str, kv_heads: int | None, head_dim: str | None, prompts: str, json_file: Path | None) -> None:
    """Time causal attention of packed prompts over pages, with BF16 and with E4M3 output, and PyTorch's of the same.

    Random data; as many copies of the inputs as fill the L2 several times; CUDA graphs that take turns. PyTorch's is
    scaled_dot_product_attention by cuDNN and by FlashAttention-2, which pads a batch to its longest prompt.

    \b
    Examples:
      fut-run bench attention --shape 8b --prompts 2048,8192
      fut-run bench attention --shape 8b --kv-heads 32 --prompts 2048,8x2048,2048+7x128 --json results.jsonl
    """
    from fut_runtime.bench.attention import Heads, measure, parse_case
    from fut_runtime.errors import FutError

    name, model = named_shape(shape)
    heads = Heads(model.num_heads, kv_heads or model.num_kv_heads, int(head_dim or model.head_dim))
    if heads.heads % heads.kv_heads:
        raise FutError(f"--kv-heads is {heads.kv_heads}, expected a divisor of the {heads.heads} heads")
    cases = prompts.split(",")
    for case in cases:
        parse_case(case)
    device, facts = card_and_facts()
    results = []
    for result in measure(heads, cases, device):
        results.append(result)
        append_line(json_file, {"bench": "attention", "shape": name, **result.to_json(), **facts})
    print_table(str(facts["card"]), results)


def print_table(card: str, results: Sequence[AttentionResult]) -> None:
    """Microseconds, 10¹² operations a second, and how many times faster than each peer."""
    from rich.console import Console
    from rich.table import Table

    from fut_runtime.bench.attention import OURS, PEERS

    heads = results[0].heads
    console = Console(highlight=False, width=_TABLE_WIDTH)
    console.print(
        f"{heads.heads} heads, {heads.kv_heads} KV heads, head_dim {heads.head_dim}; {card}; µs, Tflop/s below the "
        "diagonal, and how many times faster than PyTorch"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("prompts", *OURS, *PEERS, "Tflop/s", *(f"× {peer}" for peer in PEERS)):
        table.add_column(column, justify="right")
    for r in results:
        cells = [r.case, *(f"{r.us[name]:.1f}" if name in r.us else "–" for name in (*OURS, *PEERS))]
        cells.append(f"{r.teraflops('fut_bf16'):.0f}")
        cells += [f"{r.ratio('fut_bf16', peer):.2f}" if peer in r.us else "–" for peer in PEERS]
        table.add_row(*cells)
    console.print(table)
