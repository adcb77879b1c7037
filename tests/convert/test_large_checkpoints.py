"""The plan of a checkpoint of 405 billion weights, from headers alone: its shards are sparse files."""

from __future__ import annotations

import math
from pathlib import Path

from plan_process import plan_in_a_process
from sparse_checkpoint import tensors, write_sparse_checkpoint

MOST_MEMORY_BYTES = 500_000_000
MOST_SECONDS = 10


def test_the_plan_of_405b_reads_headers_only_and_finds_the_byte_that_is_missing(tmp_path: Path) -> None:
    checkpoint = tmp_path / "405b"
    assert write_sparse_checkpoint(checkpoint) >= 191
    shard = next(checkpoint.glob("model-00100-of-*.safetensors"))
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1)
    found = plan_in_a_process(checkpoint, tmp_path / "out")
    assert found["input_bytes"] == sum(2 * math.prod(shape) for _, shape in tensors())
    assert 600e9 < found["output_bytes"] < 640e9
    assert found["peak_bytes"] < MOST_MEMORY_BYTES
    # Of the processor's time, for other tests run beside this one.
    assert found["cpu_seconds"] < MOST_SECONDS
    short = f"{shard.name}: truncated, has {size - 1} bytes where its header says {size}"
    # The disk that holds this test may have no room for it; nothing else stands in the way.
    others = [problem for problem in found["problems"] if "are free there" not in problem]
    assert len(others) == 1 and short in others[0]
