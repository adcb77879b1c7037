"""Reads damaged files for minutes, in processes of their own that may hang, die or run out of memory.

    python benchmarks/fuzz_readers.py --minutes 10 --reader gguf

Every case has a number from which it is made again: --case 123 reads that one and shows what it raises. A line for each
reader goes to --json. The exit code is 1 where anything but our own errors came out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from fuzzing.limits import MEMORY_BYTES, SECONDS, foreign_error  # noqa: E402
from fuzzing.reader import OWN_ERRORS, Reader  # noqa: E402
from fuzzing.readers import READERS  # noqa: E402

#: A process that says nothing for so long hangs where no signal reaches it. A busy machine imports for half a minute.
_SILENCE_S = 12 * SECONDS
#: Different faults that are shown of one reader before it is given up.
_MOST_FAULTS = 50


@dataclass
class Result:
    """What came of a reader."""

    reader: str
    cases: int = 0
    own_errors: int = 0
    read_whole: int = 0
    seconds: float = 0.0
    peak_mb: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [reader.name for reader in READERS]
    parser.add_argument("--reader", action="append", choices=names, help="may be repeated; all by default")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each reader")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="read this case only, and show what it raises")
    parser.add_argument("--json", type=Path, help="append a line a reader")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    readers = options.reader or names
    if options.case is not None:
        return _show(readers[0], options.case)
    if options.worker:
        return _work(readers[0], options.seed)
    failed = False
    for name in readers:
        result = _fuzz(name, options.seed, options.minutes * 60)
        line = json.dumps({**asdict(result), "limits": {"seconds": SECONDS, "memory_mb": MEMORY_BYTES >> 20}})
        print(line, flush=True)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        failed = failed or bool(result.faults)
    return int(failed)


def _fuzz(name: str, seed: int, seconds: float) -> Result:
    """Run workers, one after the other where one does not survive, until the time is up."""
    result, start = Result(name), time.monotonic()
    while time.monotonic() - start < seconds and len(result.faults) < _MOST_FAULTS:
        command = [sys.executable, __file__, "--worker", "--reader", name, "--seed", str(seed + result.cases)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
            died = _follow(worker, result, start + seconds)
            worker.kill()
        if died is not None:
            result.cases += 1
            result.faults.setdefault(died, seed + result.cases - 1)
    result.seconds = round(time.monotonic() - start, 1)
    return result


def _follow(worker: subprocess.Popen[bytes], result: Result, end: float) -> str | None:
    """Count what a worker says; what ended it before its time, or None."""
    assert worker.stdout is not None
    os.set_blocking(worker.stdout.fileno(), False)
    heard, rest = time.monotonic(), b""
    while time.monotonic() < end:
        rest += worker.stdout.read() or b""
        *lines, rest = rest.split(b"\n")
        for line in lines:
            heard = time.monotonic()
            if line:
                _count(json.loads(line), result)
        if worker.poll() is not None and not lines:
            return f"the process died with exit code {worker.returncode}"
        if time.monotonic() - heard > _SILENCE_S:
            return f"said nothing for {_SILENCE_S} s"
        time.sleep(0.05)
    return None


def _count(said: dict[str, object], result: Result) -> None:
    result.cases += 1
    result.own_errors += said["outcome"] == "own"
    result.read_whole += said["outcome"] == "whole"
    result.peak_mb = max(result.peak_mb, float(str(said["peak_mb"])))
    if said["outcome"] == "foreign":
        result.faults.setdefault(str(said["error"]), int(str(said["case"])))


def _work(name: str, seed: int) -> int:
    """Read case after case, a line each, until killed."""
    with tempfile.TemporaryDirectory(dir=_memory_directory()) as folder:
        reader = _reader(name, Path(folder))
        print(flush=True)
        base = _peak_mb()
        case = seed
        while True:
            outcome, error = _judge(reader, case)
            said = {"case": case, "outcome": outcome, "peak_mb": round(_peak_mb() - base, 1)}
            if error is not None:
                said["error"] = _signature(error)
            print(json.dumps(said), flush=True)
            case += 1


def _judge(reader: Reader, case: int) -> tuple[str, BaseException | None]:
    place = reader.write(reader.damaged(Random(case)))
    raised: list[BaseException] = []

    def read() -> None:
        try:
            reader.read(place)
        except OWN_ERRORS as error:
            raised.append(error)
            raise

    error = foreign_error(read, OWN_ERRORS, reader.memory_bytes)
    return ("foreign", error) if error is not None else ("own" if raised else "whole", None)


def _show(name: str, case: int) -> int:
    with tempfile.TemporaryDirectory(dir=_memory_directory()) as folder:
        reader = _reader(name, Path(folder))
        place = reader.write(reader.damaged(Random(case)))
        error = foreign_error(lambda: reader.read(place), OWN_ERRORS, reader.memory_bytes)
        if error is None:
            print("nothing but our own errors")
            return 0
        traceback.print_exception(error)
        return 1


def _signature(error: BaseException) -> str:
    """Type and place of an error: equal for cases that meet the same fault."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/fut_" in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"
    return f"{type(error).__name__} at {place}: {str(error)[:100]!a}"


def _reader(name: str, folder: Path) -> Reader:
    return next(reader for reader in READERS if reader.name == name)(folder)


def _memory_directory() -> str | None:
    """Where files lie in memory, on Linux."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
