"""How fast an artifact's weights reach a device, beside a plain read of the same bytes of the same files.

Both use the same pieces, in the same order, and as many threads; the plain read overwrites ordinary buffers. They take
turns, in the page cache, or with `--cold` dropped from it before each. Appends a line to `results/load-artifact.jsonl`.

    python benchmarks/load_artifact.py OUT --device cuda
    python benchmarks/load_artifact.py --layers 32 --device cuda    # a random one of the shape of Llama-3.1-8B, INT4
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from convert_8b_shape import CONFIG, commit, machine

from fut_runtime.artifact.fragment import DEFAULT_NIBBLE_ORDER, DEFAULT_SCALE_ORDER
from fut_runtime.artifact.layout import all_tensors, padded_e4m3_shape, padded_int4_shape
from fut_runtime.artifact.manifest import ActivationSpec, KVCacheSpec, Manifest, WeightSpec
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.shards import TORCH_DTYPES
from fut_runtime.artifact.spec import MODULES, ModelSpec, RopeSpec
from fut_runtime.artifact.writer import ArtifactWriter
from fut_runtime.cuda.arena import PIECE_BYTES, THREADS, ArenaPlan, Piece, fill
from fut_runtime.cuda.tensors import DECODE_FORMATS, choose_decode_mode, needed_tensors

RESULTS = Path(__file__).parent / "results" / "load-artifact.jsonl"


def write_8b(out: Path, layers: int) -> Path:
    """An INT4 artifact with an E4M3 head, of random bytes; the scales are not numbers one would compute with."""
    model = ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=CONFIG["hidden_size"],
        intermediate_size=CONFIG["intermediate_size"],
        num_layers=layers,
        num_heads=CONFIG["num_attention_heads"],
        num_kv_heads=CONFIG["num_key_value_heads"],
        head_dim=128,
        vocab_size=CONFIG["vocab_size"],
        rms_norm_eps=CONFIG["rms_norm_eps"],
        max_position_embeddings=CONFIG["max_position_embeddings"],
        rope=RopeSpec(theta=CONFIG["rope_theta"]),
        tie_word_embeddings=False,
    )
    weights = {f"layers.{i}.{module}": {"int4": _int4(model, module)} for i in range(layers) for module in MODULES}
    head = model.module_shape("head")
    weights["head"] = {
        "e4m3": WeightSpec("e4m3", head, padded_e4m3_shape(head), "natural", "folded", scale_dtype="float32")
    }
    manifest = Manifest(
        model=model,
        weights=weights,
        kv_cache=KVCacheSpec(),
        activation=ActivationSpec(calibrated=False, margin=1.0),
        head="e4m3",
        source={"kind": "synthetic", "id": "8b"},
        recipe={},
        tools={},
    )
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(256, (1 << 28,), dtype=torch.uint8, generator=generator)
    with ArtifactWriter(out, manifest) as writer:
        for spec in all_tensors(manifest):
            repeats = -(-spec.nbytes // len(pool))
            raw = pool.repeat(repeats)[: spec.nbytes] if repeats > 1 else pool[: spec.nbytes]
            writer.write(spec.name, raw.view(TORCH_DTYPES[spec.dtype]).view(spec.shape))
        return writer.seal()


def _int4(model: ModelSpec, module: str) -> WeightSpec:
    shape, paired = model.module_shape(module), module == "gate_up"
    return WeightSpec(
        "int4",
        shape,
        padded_int4_shape(shape, 128, paired),
        "interleave8" if paired else "natural",
        "folded" if module in ("qkv", "gate_up") else "none",
        group_size=128,
        scale_dtype="bfloat16",
        nibble_order=DEFAULT_NIBBLE_ORDER,
        scale_order=DEFAULT_SCALE_ORDER,
    )


def plain_read(pieces: Sequence[Piece], threads: int) -> None:
    """Read pieces into ordinary memory, each thread into one buffer again and again."""
    queue, lock = iter(pieces), threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        files: dict[Path, int] = {}
        while True:
            with lock:
                piece = next(queue, None)
            if piece is None:
                break
            if piece.file not in files:
                files[piece.file] = os.open(piece.file, os.O_RDONLY)
            done = 0
            while done < piece.nbytes:
                done += os.preadv(files[piece.file], [buffer[done : piece.nbytes]], piece.offset + done)
        for descriptor in files.values():
            os.close(descriptor)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def forget(files: Iterable[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path, device: torch.device, *, rounds: int, threads: int, cold: bool) -> dict[str, object]:
    """GB/s of both, in turns: the median and all."""
    artifact = Artifact.open(path)
    mode = choose_decode_mode(artifact, None)
    plan = ArenaPlan.of(needed_tensors(artifact.manifest, DECODE_FORMATS[mode]))
    pieces = plan.pieces(artifact)
    nbytes = sum(piece.nbytes for piece in pieces)
    arena = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
    speeds: dict[str, list[float]] = {"plain": [], "load": []}
    plain_read(pieces, threads)
    fill(arena, pieces, threads=threads)  # the first one pins the buffers
    for _, kind in itertools.product(range(rounds), speeds):
        if cold:
            forget({piece.file for piece in pieces})
        begin = time.perf_counter()
        if kind == "plain":
            plain_read(pieces, threads)
        else:
            fill(arena, pieces, threads=threads)
        speeds[kind].append(nbytes / 1e9 / (time.perf_counter() - begin))
    medians = {kind: statistics.median(values) for kind, values in speeds.items()}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        **machine(),
        "gigabytes": nbytes / 1e9,
        "shards": len({piece.file for piece in pieces}),
        "threads": threads,
        "cold": cold,
        "plain_gb_s": [round(v, 2) for v in speeds["plain"]],
        "load_gb_s": [round(v, 2) for v in speeds["load"]],
        "ratio": round(medians["load"] / medians["plain"], 3),
    }


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=32, help="layers of the random artifact, where none is named")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each read")
    parser.add_argument("--directory", type=Path, help="where the random artifact is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        path = options.artifact or write_8b(Path(scratch) / "artifact", options.layers)
        device = torch.device(options.device)
        result = measure(path, device, rounds=options.rounds, threads=options.threads, cold=options.cold)
    for kind in ("plain", "load"):
        print(f"{kind:>6} GB/s: {result[f'{kind}_gb_s']}")
    print(f" ratio: {result['ratio']} of {result['gigabytes']:.2f} GB in {result['shards']} shards")
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
