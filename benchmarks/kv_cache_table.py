#!/usr/bin/env python3
"""What each choice of the INT4 cache costs: scales, groups, rotation, clipping, K and V apart, long contexts.

    python benchmarks/kv_cache_table.py MODEL --label NAME --text wiki.test.raw --window 2048 --window 8192

BF16 weights, FP32 compute, every token through the decode path; K and V of every token are quantised and dequantised as
each row says before any query reads them. One JSON line a row goes to benchmarks/results/kv_cache.jsonl.
"""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from accuracy_table import Remembered  # noqa: E402

from fut_convert.checkpoint_model import model_from_checkpoint  # noqa: E402
from fut_convert.sources import open_source  # noqa: E402
from fut_runtime.bench.machine import source_commit  # noqa: E402
from fut_runtime.evaluate.perplexity import evaluate_perplexity  # noqa: E402
from fut_runtime.evaluate.runner import ReferenceRunner  # noqa: E402
from fut_runtime.evaluate.windows import cut_windows  # noqa: E402
from fut_runtime.reference.cache import RequestCache  # noqa: E402
from fut_runtime.reference.model import ReferenceModel  # noqa: E402
from fut_runtime.reference.rotation import rotate, sylvester_hadamard  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "kv_cache.jsonl"


@dataclass(frozen=True)
class CacheChoice:
    """How one of K and V is kept.

    Attributes:
        group: channels that share a scale, 0 for the whole head.
        block: size of a Hadamard block, 0 for no rotation, -1 for the largest that fits.
        zero_point: a zero point beside the scale.
        clip: the range that the codes span, as a share of the values' own.
    """

    group: int = 0
    block: int = -1
    zero_point: bool = True
    clip: float = 1.0

    def apply(self, x: Tensor) -> Tensor:
        """x [tokens, heads, head_dim] as it comes back from the cache."""
        dim = x.shape[-1]
        block = dim & -dim if self.block < 0 else self.block
        signs = sylvester_hadamard(block).to(x.device) if block else None
        turned = x if signs is None else rotate(x, signs)
        grouped = turned.unflatten(-1, (-1, self.group or dim))
        low, high = grouped.amin(-1, keepdim=True) * self.clip, grouped.amax(-1, keepdim=True) * self.clip
        if self.zero_point:
            zero = _bf16(low)
            scale = _bf16((high - zero).clamp_min(0) / 15)
        else:
            scale = _bf16(torch.maximum(-low, high) / 7)
            zero = -8 * scale
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        codes = ((grouped - zero) / scale).round().clamp(0, 15)
        kept = (codes * scale + zero).flatten(-2)
        return kept if signs is None else rotate(kept, signs)


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


class ChoiceCache(RequestCache):
    """A cache that keeps K and V as they would come back from INT4."""

    choices: tuple[CacheChoice | None, CacheChoice | None] = (None, None)

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep what INT4 makes of K and V, and attend over it."""
        k, v = (x if choice is None else choice.apply(x) for x, choice in zip((k, v), self.choices, strict=True))
        return self.prefill(layer, q, k, v)


@dataclass(frozen=True)
class ChoiceModel(ReferenceModel):
    """A checkpoint's model with caches of the chosen kind."""

    choices: tuple[CacheChoice | None, CacheChoice | None] = (None, None)

    def new_cache(self, capacity: int) -> RequestCache:
        """Empty cache for `capacity` tokens."""
        signs = sylvester_hadamard(self.spec.rotation_block).to(self.device)
        cache = ChoiceCache(self.spec, self.kv_cache, capacity, signs, self.numerics, self.device)
        cache.choices = self.choices
        return cache


def rows(head_dim: int) -> dict[str, tuple[CacheChoice | None, CacheChoice | None]]:
    """Name of a row -> how K and V are kept."""
    default = CacheChoice()
    both = {
        "symmetric": CacheChoice(block=0, zero_point=False),
        "zero point": CacheChoice(block=0),
        "symmetric, rotated": CacheChoice(zero_point=False),
        "zero point, rotated": default,
        "zero point, groups of 32": CacheChoice(block=0, group=32),
        "symmetric, rotated, groups of 32": CacheChoice(zero_point=False, group=32),
        "zero point, rotated, groups of 32": CacheChoice(group=32),
    }
    both |= {f"zero point, rotated by {b}": CacheChoice(block=b) for b in (8, 16, 32, 64) if head_dim % b == 0}
    both |= {f"zero point, rotated, clipped to {c}": CacheChoice(clip=c) for c in (0.95, 0.9, 0.85)}
    named: dict[str, tuple[CacheChoice | None, CacheChoice | None]] = {n: (c, c) for n, c in both.items()}
    return named | {
        "K alone: zero point": (CacheChoice(block=0), None),
        "K alone: zero point, rotated": (default, None),
        "V alone: zero point": (None, CacheChoice(block=0)),
        "V alone: zero point, rotated": (None, default),
        "K rotated, V not: zero point": (default, CacheChoice(block=0)),
    }


@click.command()
@click.argument("model")
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--label", required=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--window", "window_sizes", type=int, multiple=True, default=(2048,), show_default=True)
@click.option("--max-windows", type=int)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@torch.inference_mode()
def main(
    model: str, text: Path, label: str, device: str, window_sizes: tuple[int, ...], max_windows: int | None, out: Path
) -> None:
    """Measure the cache of MODEL, a checkpoint directory or .gguf file."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with open_source(model) as source:
        checkpoint = model_from_checkpoint(source, device=device)
        tokenizer = next(c for n, c in source.side_files() if n == "tokenizer.json")
    data = tokenizer if isinstance(tokenizer, bytes) else tokenizer.read_bytes()
    ids = Tokenizer.from_str(data.decode()).encode(text.read_text("utf-8")).ids
    facts = {
        "text": text.name, "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
        "commit": source_commit() or "unknown", "date": str(datetime.date.today()),
    }  # fmt: skip
    parts = {f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}
    out.parent.mkdir(parents=True, exist_ok=True)
    for size in window_sizes:
        windows = cut_windows(ids, size, max_windows)
        baseline = Remembered(ReferenceRunner(checkpoint, "decode"))
        for name, choices in rows(checkpoint.spec.head_dim).items():
            runner = ReferenceRunner(ChoiceModel(**parts, choices=choices), "decode")
            result = evaluate_perplexity(runner, windows, baseline=baseline)
            if result.kl is None or result.top1 is None or result.nll_difference is None:
                raise click.ClickException("the evaluation left out the baseline")
            line = {
                "model": label, "row": name, "perplexity": round(result.perplexity, 4),
                "baseline": round(result.baseline_perplexity or 0.0, 4),
                "kl": round(result.kl.mean, 5), "kl_se": round(result.kl.standard_error, 5),
                "top1": round(result.top1.mean, 5), "nll_difference": round(result.nll_difference.mean, 5),
                "nll_difference_se": round(result.nll_difference.standard_error, 5),
                "keys": None if choices[0] is None else asdict(choices[0]),
                "values": None if choices[1] is None else asdict(choices[1]),
                "windows": result.windows, "window_tokens": size, **facts,
            }  # fmt: skip
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{size:6d} {name:40s} {result.perplexity:9.3f}  KL {result.kl.mean:.4f}", flush=True)


if __name__ == "__main__":
    main()
