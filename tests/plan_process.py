"""Plans a conversion in a process of its own, to see what that takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from repository import REPOSITORY

_PROGRAM = """
import json, sys, time
from fut_convert import plan_conversion
from fut_convert.memory import peak_host_bytes
started = time.monotonic()
plan = plan_conversion(sys.argv[1], sys.argv[2], overrides={"calibration.enabled": False})
print(json.dumps({
    "input_bytes": plan.input_bytes, "output_bytes": plan.output_bytes, "problems": list(plan.errors),
    "plan_seconds": time.monotonic() - started, "cpu_seconds": time.process_time(), "peak_bytes": peak_host_bytes(),
}))
"""


def plan_in_a_process(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Sizes, problems, seconds (`plan_seconds` of the plan, `cpu_seconds` of the process) and the process's peak."""
    command = [sys.executable, "-c", _PROGRAM, str(checkpoint), str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
