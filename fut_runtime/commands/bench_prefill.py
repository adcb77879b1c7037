"""`fut-run bench prefill`: layers over prompts beside PyTorch's, time to the first token, and packed prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fut_runtime.commands.bench_setup import append_line, card_and_facts, json_option, named_shape
from fut_runtime.commands.options import numbers

if TYPE_CHECKING:
    from fut_runtime.bench.prefill import FirstTokenResult, LayerResult

_TABLE_WIDTH = 140
#: Prompts that are packed into one run, and the same as if they were padded to the longest.
PACKED = ([2048] * 8, [2048] + [128] * 7)


@click.command(short_help="Time prompts.")
@click.option("--shape", default="8b", show_default=True, metavar="1b|8b|70b|405b", help="The sizes of a Llama.")
@click.option(
    "--tokens",
    callback=numbers,
    default="512,2048",
    show_default=True,
    metavar="S,…",
    help="Tokens of a prompt, one prompt a run.",
)
@click.option("--packed", is_flag=True, help="Also eight prompts a run: all of 2048 tokens, and one with seven of 128.")
@click.option("--first-token", "first_token", is_flag=True, help="Also the whole model, to its first token.")
@click.option("--bf16/--no-bf16", default=True, show_default=True, help="Also with BF16 weights and activations.")
@click.option(
    "--peers/--no-peers",
    default=True,
    show_default=True,
    help="Also PyTorch's compiled layer, in FP8 with fixed scales and in BF16; compiling takes minutes.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw a roofline of the layers to a PNG.",
)
@json_option("case")
def prefill(
    shape: str,
    tokens: list[int],
    packed: bool,
    first_token: bool,
    bf16: bool,
    peers: bool,
    plot: Path | None,
    json_file: Path | None,
) -> None:
    """Time one layer over prompts, and PyTorch's compiled layer in the same run; and what else is asked for.

    Random weights and tokens. A layer is the difference of four layers and one, so that embedding and head are not in
    it; ours and the peer's take turns.

    \b
    Examples:
      fut-run bench prefill --shape 8b --tokens 512,1024,2048,4096,8192
      fut-run bench prefill --shape 8b --tokens 2048,8192 --first-token --packed --json results.jsonl --plot roof.png
    """
    from fut_runtime.bench.prefill import MODES, measure_first_tokens, measure_layers
    from fut_runtime.bench.timing import read_bandwidth

    name, model = named_shape(shape)
    device, about = card_and_facts()
    facts = {"bench": "prefill", "shape": name, **about}
    modes = [mode for mode in MODES if bf16 or mode == "fut_fp8"]
    cases = [[count] for count in tokens] + [*(PACKED if packed else ())]
    layers = []
    for layer in measure_layers(model, cases, device, peers=peers, modes=modes):
        layers.append(layer)
        append_line(json_file, {**facts, **layer.to_json()})
    print_layers(name, str(facts["card"]), layers)
    if plot is not None:
        plot.write_bytes(roofline(name, layers, read_bandwidth(device)))
    if first_token:
        found = []
        for first in measure_first_tokens(model, tokens, device, modes=modes):
            found.append(first)
            append_line(json_file, {**facts, **first.to_json()})
        print_first_tokens(name, found)


def case_text(lengths: Sequence[int]) -> str:
    """`2048`, `8 × 2048`, `2048 + 7 × 128`."""
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length] = counts.get(length, 0) + 1
    return " + ".join(str(length) if count == 1 else f"{count} × {length}" for length, count in counts.items())


def print_layers(shape: str, card: str, results: Sequence[LayerResult]) -> None:
    """Microseconds, then 10¹² operations a second and how many times faster than the peer."""
    from rich.console import Console
    from rich.table import Table

    from fut_runtime.bench.prefill import MODES

    console = Console(highlight=False, width=_TABLE_WIDTH)
    console.print(f"{shape}, one layer; {card}; µs, then Tflop/s and how many times faster than PyTorch, padded")
    names = list(results[0].us)
    table = Table(box=None, pad_edge=False)
    for column in ("prompts", *names):
        table.add_column(column, justify="right")
    for name in MODES:
        if name in names:
            table.add_column(name.removeprefix("fut_"), justify="right")
            table.add_column("× torch", justify="right")
    for r in results:
        cells = [case_text(r.lengths), *(f"{r.us[name]:.1f}" for name in names)]
        for name in MODES:
            if name in names:
                ratio = r.ratio(name)
                cells += [f"{r.teraflops(name):.0f}", "" if ratio is None else f"{ratio:.2f}"]
        table.add_row(*cells)
    console.print(table)


def print_first_tokens(shape: str, results: Sequence[FirstTokenResult]) -> None:
    """Milliseconds to the first token, and tokens a second."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=_TABLE_WIDTH)
    console.print(f"\n{shape}, {results[0].layers} layers, to the first token; ms, then tokens a second")
    table = Table(box=None, pad_edge=False)
    names = list(results[0].ms)
    for column in ("tokens", *names, *(f"{name} tokens/s" for name in names)):
        table.add_column(column, justify="right")
    for r in results:
        rates = (f"{r.tokens / r.ms[name] * 1e3:,.0f}" for name in names)
        table.add_row(str(r.tokens), *(f"{r.ms[name]:.2f}" for name in names), *rates)
    console.print(table)


def roofline(shape: str, results: Sequence[LayerResult], read_bytes_per_s: float) -> bytes:
    """PNG of the layers' operations a byte and a second."""
    from fut_runtime.bench.roofline import Point, draw_roofline

    points: dict[str, list[Point]] = {}
    for r in results:
        for name in r.us:
            nbytes = r.bytes.get(name.replace("torch_", "fut_"))
            if nbytes is not None:
                points.setdefault(name, []).append((r.operations / nbytes, r.teraflops(name), case_text(r.lengths)))
    return draw_roofline(points, read_bytes_per_s, f"{shape}, one layer over prompts")
