#!/usr/bin/env python3
"""How long every kernel of a decode step and of a prompt takes inside of them, by CUPTI.

    python benchmarks/kernel_times.py --decode 1x1024,8x1024,32x4096 --prefill 512,2048

Random weights of a shape. For each case: microseconds a layer from the first kernel's start to the last one's end, then
what each kernel takes, then one stretch of the run as a timeline. Kernels overlap (a kernel starts while the one before
it ends), so their times add up to more than the whole: from one's end to the next one's is what a kernel costs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch.profiler import ProfilerActivity, profile

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from fut_runtime.artifact.manifest import KVCacheSpec  # noqa: E402
from fut_runtime.bench.decode import SAMPLINGS  # noqa: E402
from fut_runtime.bench.model import BenchModel  # noqa: E402
from fut_runtime.bench.prefill_model import BenchPrompts  # noqa: E402
from fut_runtime.bench.shapes import SHAPES, manifest_of, with_layers  # noqa: E402
from fut_runtime.cuda.decoder import Row  # noqa: E402
from fut_runtime.cuda.prefill_weights import PREFILL_FORMATS  # noqa: E402

WARM_UP, RUNS = 5, 4
#: Kernels of the timeline: two layers and a bit.
SHOWN = 14


def show(title: str, work: Callable[[], object], layers: int) -> None:
    """Profile RUNS runs of some work and print them."""
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(RUNS):
            work()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, short(event.name))
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem")
    )
    share = RUNS * layers
    totals: dict[str, tuple[int, float]] = {}
    for start, end, name in kernels:
        count, total = totals.get(name, (0, 0.0))
        totals[name] = count + 1, total + end - start
    print(f"{title}: {(kernels[-1][1] - kernels[0][0]) / share:.2f} µs a layer")
    for name, (count, total) in sorted(totals.items(), key=lambda item: -item[1][1]):
        print(f"  {total / share:9.2f} µs a layer, {count:5d} of {total / count:8.2f}  {name}")
    middle = len(kernels) // 2
    for start, end, name in kernels[middle : middle + SHOWN]:
        print(f"    {start - kernels[middle][0]:9.2f} to {end - kernels[middle][0]:9.2f}  {name}")
    sys.stdout.flush()


def short(name: str) -> str:
    """A kernel's name without namespaces and arguments."""
    return re.sub(r"fut::|\(anonymous namespace\)::|void ", "", name).split("(CU", maxsplit=1)[0][:80]


def decode_steps(shape: str, cases: str, layers: int, device: torch.device) -> None:
    """INT4 steps of so many requests with so many tokens each."""
    pairs = [(int(batch), int(context)) for batch, context in (case.split("x") for case in cases.split(","))]
    manifest = with_layers(manifest_of(SHAPES[shape], "int4", KVCacheSpec()), layers)
    most, longest = (max(values) for values in zip(*pairs, strict=True))
    model = BenchModel(manifest, "int4", KVCacheSpec(), batch=most, context=longest, device=device)
    with model.decoder(layers) as decoder:
        for batch, context in pairs:
            for slot in range(batch):
                decoder.set_pages(slot, model.slot_pages(slot, context))
            rows = [Row(token=7919 * slot + 1, position=context - 1, slot=slot) for slot in range(batch)]
            draws = [SAMPLINGS["greedy"]] * batch
            show(f"decode {batch} x {context}", lambda: decoder.step(rows, range(len(rows)), draws), layers)  # noqa: B023
    model.release()


def prompts(shape: str, lengths: str, layers: int, device: torch.device) -> None:
    """E4M3 prompts, one a run."""
    model = with_layers(manifest_of(SHAPES[shape], "e4m3", KVCacheSpec()), layers).model
    manifest = manifest_of(model, PREFILL_FORMATS["e4m3"], KVCacheSpec())
    for tokens in map(int, lengths.split(",")):
        bench = BenchPrompts(manifest, "e4m3", tokens=tokens, context=tokens, device=device)
        with bench.deep(layers) as deep:
            chunks = deep.chunks([tokens])
            show(f"prefill {tokens}", lambda: deep.run(chunks), layers)  # noqa: B023
        bench.release()


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b", show_default=True)
@click.option("--layers", type=click.IntRange(1), default=6, show_default=True)
@click.option("--decode", "decode_cases", default="1x1024,32x4096", show_default=True, help="Requests x tokens, …")
@click.option("--prefill", "prefill_cases", default="512,2048", show_default=True, help="Tokens of a prompt, …")
def main(shape: str, layers: int, decode_cases: str, prefill_cases: str) -> None:
    """Print the times of kernels; an empty list of cases leaves them out."""
    device = torch.device("cuda")
    if decode_cases:
        decode_steps(shape, decode_cases, layers, device)
    if prefill_cases:
        prompts(shape, prefill_cases, layers, device)


if __name__ == "__main__":
    main()
