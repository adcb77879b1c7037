"""`fut-run bench`: what work takes here, what the card allows, and what stock PyTorch takes in the same run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fut_runtime.commands.bench_attention import attention
from fut_runtime.commands.bench_gemm import gemm
from fut_runtime.commands.bench_prefill import prefill
from fut_runtime.commands.bench_setup import card_and_facts, json_option
from fut_runtime.commands.bench_w8a16 import w8a16
from fut_runtime.commands.options import numbers

if TYPE_CHECKING:
    import torch

    from fut_runtime.bench.decode import DecodePlan, DecodeResult


@click.group(short_help="Measure against the card and PyTorch.")
def bench() -> None:
    """Measure how fast this card decodes, reads prompts, and multiplies and attends for them."""


bench.add_command(gemm)
bench.add_command(w8a16)
bench.add_command(attention)
bench.add_command(prefill)


@bench.command(short_help="Time decode steps.")
@click.option(
    "--shape",
    default="8b",
    show_default=True,
    metavar="8b|70b|1b|OUT",
    help="The sizes of a Llama, with random weights; or an artifact.",
)
@click.option(
    "--batch",
    "batches",
    callback=numbers,
    default="1",
    show_default=True,
    metavar="B,…",
    help="Requests that decode together.",
)
@click.option(
    "--context",
    "contexts",
    callback=numbers,
    default="1024",
    show_default=True,
    metavar="N,…",
    help="Tokens of each request.",
)
@click.option("--layers", type=click.IntRange(1), metavar="N", help="Only so many layers.  [default: all]")
@click.option("--mode", type=click.Choice(["int4", "fp8", "bf16"]), default="int4", show_default=True, help="Weights.")
@click.option("--kv-cache", type=click.Choice(["int4", "bf16"]), help="[default: int4, or what the artifact says]")
@click.option(
    "--sampling",
    type=click.Choice(["greedy", "filtered"]),
    default="greedy",
    show_default=True,
    help="filtered: temperature 0.8, top-k 50, top-p 0.95.",
)
@click.option("--per-layer", is_flag=True, help="Also the time of one layer, from two depths.")
@click.option(
    "--peers/--no-peers",
    default=True,
    show_default=True,
    help="Also PyTorch's time for the same layers; compiling them takes minutes.",
)
@json_option("case")
def decode(
    shape: str,
    batches: list[int],
    contexts: list[int],
    layers: int | None,
    mode: str,
    kv_cache: str | None,
    sampling: str,
    per_layer: bool,
    peers: bool,
    json_file: Path | None,
) -> None:
    """Time decode steps, sampling included, and compare them with what reading their bytes takes.

    The weights are random and made on the card, unless --shape names an artifact. The cache is full of random numbers.
    The floor is what a step must read (weights, scales, head, cache) over the read bandwidth measured in the same run.

    \b
    Examples:
      fut-run bench decode --shape 8b --batch 1,8,32 --context 1024,4096
      fut-run bench decode --shape 70b --layers 8 --per-layer --mode fp8 --json results.jsonl
    """
    from fut_runtime.bench.decode import measure
    from fut_runtime.bench.timing import read_bandwidth

    device, facts = card_and_facts()
    plan = _plan(shape, layers, mode, kv_cache)
    plan = replace(plan, batches=batches, contexts=contexts, sampling=sampling)
    bandwidth = read_bandwidth(device)
    results = list(measure(plan, bandwidth, per_layer=per_layer, device=device))
    if peers:
        results = _with_peers(plan, results, device)
    if json_file is not None:
        _append(json_file, plan, facts, results)
    _print(plan, facts, bandwidth, results)


def _plan(shape: str, layers: int | None, mode: str, kv_cache: str | None) -> DecodePlan:
    """The plan for one model, cases still empty."""
    from fut_runtime.artifact.manifest import KVCacheSpec
    from fut_runtime.artifact.reader import Artifact
    from fut_runtime.bench.decode import DecodePlan
    from fut_runtime.bench.shapes import SHAPES, manifest_of, with_layers
    from fut_runtime.cuda.memory_plan import choose_cache
    from fut_runtime.cuda.tensors import DECODE_FORMATS, check_supported, choose_decode_mode
    from fut_runtime.errors import FutError
    from fut_runtime.resolve import resolve_artifact

    artifact = None
    weight_format = DECODE_FORMATS[mode]
    if shape.lower() in SHAPES:
        manifest = manifest_of(SHAPES[shape.lower()], weight_format, KVCacheSpec())
    else:
        artifact = Artifact.open(resolve_artifact(shape))
        choose_decode_mode(artifact, mode)
        check_supported(artifact, weight_format)
        manifest = artifact.manifest
    if layers is not None:
        if layers > manifest.model.num_layers:
            raise FutError(f"--layers is {layers}, but the model has {manifest.model.num_layers}")
        manifest = with_layers(manifest, layers)
    name = shape.lower() if artifact is None else artifact.path.name
    cache = choose_cache(manifest, kv_cache)
    return DecodePlan(name, manifest, mode, weight_format, cache, batches=(), contexts=(), artifact=artifact)


def _with_peers(plan: DecodePlan, results: Sequence[DecodeResult], device: torch.device) -> list[DecodeResult]:
    from fut_runtime.bench.peers import PEERS, peer_layer_us

    cases = [(r.batch, r.context) for r in results]
    times = {name: peer_layer_us(plan.manifest.model, weights, cases, device) for name, weights in PEERS.items()}
    return [
        replace(r, peers_layer_us={name: found[r.batch, r.context] for name, found in times.items()}) for r in results
    ]


def _append(file: Path, plan: DecodePlan, facts: dict[str, object], results: Sequence[DecodeResult]) -> None:
    shared = {
        "bench": "decode", "shape": plan.name, "mode": plan.mode, "kv_cache_bits": plan.cache.bits,
        "head": plan.manifest.head, "random_weights": plan.artifact is None, "sampling": plan.sampling,
    }  # fmt: skip
    with file.open("a", encoding="utf-8") as lines:
        for result in results:
            lines.write(json.dumps({**shared, **result.to_json(), **facts}) + "\n")


def _print(plan: DecodePlan, facts: dict[str, object], bandwidth: float, results: Sequence[DecodeResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    layers = plan.manifest.model.num_layers
    console.print(
        f"{plan.name}, {layers} layers, {plan.mode} weights, {plan.manifest.head} head, {plan.cache.bits}-bit cache, "
        f"{plan.sampling}; {facts['card']}, reads {bandwidth / 1e12:.2f} TB/s"
    )
    table = Table(box=None, pad_edge=False)
    per_layer = any(r.layer_us is not None for r in results)
    peers = list(results[0].peers_layer_us)
    columns = ["batch", "context", "step ms", "with host ms", "floor ms", "of it", "tokens/s"]
    columns += ["layer µs", "of its floor"] * per_layer
    columns += [f"{peer} µs a layer" for peer in peers]
    for column in columns:
        table.add_column(column, justify="right")
    for r in results:
        cells = [str(r.batch), str(r.context), f"{r.step_ms:.3f}", f"{r.host_ms:.3f}", f"{r.floor_ms:.3f}"]
        cells += [f"{r.fraction:.0%}", f"{r.batch / r.step_ms * 1e3:.0f}"]
        if r.layer_us is not None and r.layer_fraction is not None:
            cells += [f"{r.layer_us:.1f}", f"{r.layer_fraction:.0%}"]
        table.add_row(*cells, *(f"{us:.1f}" for us in r.peers_layer_us.values()))
    console.print(table)
