"""What the plan of a checkpoint of 405 billion weights takes: 191 shards of headers and holes.

python benchmarks/plan_405b.py
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "plan-405b.jsonl"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

from convert_8b_shape import commit, machine  # noqa: E402

from plan_process import plan_in_a_process  # noqa: E402
from sparse_checkpoint import write_sparse_checkpoint  # noqa: E402


def main() -> None:
    """Write the checkpoint, plan its conversion, and add a line to the results."""
    with tempfile.TemporaryDirectory(prefix="plan-405b-") as workdir:
        checkpoint = Path(workdir) / "405b"
        shards = write_sparse_checkpoint(checkpoint)
        started = time.monotonic()
        found = plan_in_a_process(checkpoint, Path(workdir) / "out")
        seconds = time.monotonic() - started
    line = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit(), "machine": machine(),
        "load": round(os.getloadavg()[0], 1), "shards": shards, "input_bytes": found["input_bytes"],
        "process_seconds": round(seconds, 2),
        **{name: round(found[name], 2) for name in ("plan_seconds", "cpu_seconds")}, "peak_bytes": found["peak_bytes"],
    }  # fmt: skip
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=2))


if __name__ == "__main__":
    main()
