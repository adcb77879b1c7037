"""How fast, and in how much memory, a checkpoint of the shape of Llama-3.1-8B converts on this machine's CPU.

Writes a checkpoint of random BF16 weights (16 GB in shards as large as the published ones), converts it in a process of
its own, prints the speed, the peak memory and every step's share, and appends one line to
`results/convert-8b-shape.jsonl`. Everything it wrote is removed.

    python benchmarks/convert_8b_shape.py --layers 4      # 4 GB: a quick look
    python benchmarks/convert_8b_shape.py                 # 16 GB in, 13 GB out: needs 30 GB of disk
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "convert-8b-shape.jsonl"
REPOSITORY = Path(__file__).parent.parent

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "word": 1}, "unk_token": "<unk>"},
}
SHARD_BYTES = 5_000_000_000
#: Standard deviation of the weights: about that of a trained model's.
WEIGHT_STD = 0.02
#: Random numbers drawn; each tensor's rows begin somewhere else among them.
POOL_ELEMENTS = 1 << 26


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, in the order in which the published shards hold them."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "mlp.down_proj": (hidden, wide),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "post_attention_layernorm": (hidden,),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.v_proj": (kv, hidden),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Cut the tensors into shards of at most SHARD_BYTES."""
    shard: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        if shard and size + nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += nbytes
    yield shard


def write_checkpoint(root: Path, layers: int, shape: dict[str, Any] = CONFIG) -> int:
    """Write a checkpoint of a shape with so many layers; returns the bytes of its weights."""
    config = shape | {"num_hidden_layers": layers}
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(config, indent=2))
    (root / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (root / "tokenizer_config.json").write_text("{}")
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(POOL_ELEMENTS, dtype=torch.bfloat16)
    for block in pool.split(1 << 22):
        block.copy_(torch.randn(len(block), generator=generator) * WEIGHT_STD)
    pieces = list(shards(tensor_shapes(config)))
    weight_map: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(pieces):
        name = f"model-{index + 1:05d}-of-{len(pieces):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, name)
        total += write_shard(root / name, shard, pool, generator)
    entry = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(entry))
    return total


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], pool: Tensor, generator: torch.Generator) -> int:
    """Write one safetensors file; returns the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = math.prod(shape)
            if len(shape) == 1:
                file.write(torch.ones(shape, dtype=torch.bfloat16).view(torch.uint8).numpy().data)
                continue
            while left:
                start = int(torch.randint(len(pool) // 2, (), generator=generator))
                piece = pool[start : start + min(left, len(pool) // 2)]
                file.write(piece.view(torch.uint8).numpy().data)
                left -= len(piece)
    return end


def forget(checkpoint: Path) -> None:
    """Drop a checkpoint from the page cache: a conversion finds a real one on the disk."""
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def convert(checkpoint: Path, out: Path, scale_method: str, jobs: int) -> tuple[dict[str, Any], float, float]:
    """Convert in a process of its own: the converter's JSON, seconds of wall clock, seconds of CPU."""
    command = [sys.executable, "-c", "from fut_convert.cli import main; main()", str(checkpoint), str(out)]
    command += ["--no-calibration", "--scale-method", scale_method, "--jobs", str(jobs), "--json"]
    before, started = os.times(), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return json.loads(done.stdout), time.perf_counter() - started, cpu


def machine() -> dict[str, Any]:
    """Cores this process may use, and the CPU's name."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line[:10] == "model name"]
        model = names[0] if names else model
    return {"cores": len(os.sched_getaffinity(0)), "cpu": model, "torch": torch.__version__}


def commit() -> str:
    """The checked-out commit, with a `+` when files differ from it."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measure(checkpoint: Path, out: Path, scale_method: str, jobs: int) -> dict[str, Any]:
    """Convert, and sum up."""
    forget(checkpoint)
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    load = os.getloadavg()[0]
    result, seconds, cpu_seconds = convert(checkpoint, out, scale_method, jobs)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "layers": layers,
        "scale_method": scale_method,
        "jobs": jobs,
        "input_bytes": result["input_bytes"],
        "output_bytes": result["output_bytes"],
        "process_seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "seconds": round(result["seconds"], 2),
        "input_gb_per_second": round(result["input_bytes"] / result["seconds"] / 1e9, 4),
        "peak_memory_bytes": result["peak_memory_bytes"],
        "estimated_memory_bytes": result["estimated_memory_bytes"],
        "step_seconds": {step: round(s, 2) for step, s in result["step_seconds"].items()},
    }


def show(line: dict[str, Any]) -> None:
    """Print the figures."""
    print(f"{line['commit']}, {line['layers']} layers, {line['scale_method']}, load {line['load_before']} before")
    print(f"{line['input_bytes'] / 1e9:.2f} GB in, {line['output_bytes'] / 1e9:.2f} GB out, {line['seconds']:.1f} s "
          f"({line['process_seconds']:.1f} s with the imports, {line['cpu_seconds']:.1f} s of CPU): "
          f"{line['input_gb_per_second']:.3f} GB of input a second")  # fmt: skip
    peak, estimate = line["peak_memory_bytes"], line["estimated_memory_bytes"]
    print(f"peak memory {peak / 1e9:.2f} GB, estimated {estimate / 1e9:.2f} GB ({estimate / peak - 1:+.0%})")
    busy = sum(line["step_seconds"].values())
    print("seconds by step, summed over the threads, which work at the same time:")
    for step, seconds in sorted(line["step_seconds"].items(), key=lambda item: -item[1]):
        print(f"  {step:10} {seconds:8.2f} s  {seconds / busy:6.1%}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="decoder layers (default 32)")
    parser.add_argument("--scale-method", default="absmax_7", help="INT4 scales (default absmax_7)")
    parser.add_argument("--jobs", type=int, default=1, help="layers converted side by side (default 1)")
    parser.add_argument("--checkpoint", type=Path, help="convert this one, kept earlier, instead of writing one")
    parser.add_argument("--workdir", type=Path, help="where to write; a temporary directory by default")
    parser.add_argument("--keep", action="store_true", help="leave checkpoint and artifact in the work directory")
    arguments = parser.parse_args()
    parent = arguments.workdir
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    workdir = Path(tempfile.mkdtemp(prefix="convert-8b-", dir=parent))
    try:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = workdir / "checkpoint"
            started = time.perf_counter()
            total = write_checkpoint(checkpoint, arguments.layers)
            print(f"checkpoint: {total / 1e9:.2f} GB written in {time.perf_counter() - started:.0f} s", flush=True)
        line = measure(checkpoint, workdir / "artifact", arguments.scale_method, arguments.jobs)
    finally:
        if arguments.keep:
            print(f"kept: {workdir}")
        else:
            shutil.rmtree(workdir)
    show(line)
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
