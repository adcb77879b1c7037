"""Kills conversions at random moments, has each go on, and compares the result with an undisturbed one's, byte by byte.

A kill is a SIGKILL at one of the calls to the file system, drawn at random; a write that is the last is cut in half.
Every conversion is killed until it ends by itself, at most `--most` times. The recipes take turns: without calibration,
calibrated, GPTQ, and now and then with other processes. `--seconds` ends it earlier; lines of several seeds add up,
and with `--keep` they share what is undisturbed.

    python benchmarks/kill_conversions.py --kills 200
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "kill-conversions.jsonl"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

from convert_8b_shape import commit, machine  # noqa: E402

from fut_convert import convert  # noqa: E402
from fut_runtime.artifact.remains import clear_behind_renaming  # noqa: E402
from fut_runtime.artifact.staging import check_unlocked  # noqa: E402
from fut_runtime.errors import ArtifactError  # noqa: E402
from interrupted import RECIPES, sealed  # noqa: E402
from killed_conversion import convert_and_kill  # noqa: E402
from synthetic_checkpoint import CheckpointShape, write_checkpoint  # noqa: E402

LAYERS = 4
#: Recipe and options of each turn.
TURNS: list[tuple[str, dict[str, Any]]] = [
    ("uncalibrated", {}),
    ("rtn", {}),
    ("gptq", {}),
    ("uncalibrated", {"jobs": 2}),
    ("gptq", {"calibration_processes": 2}),
]
#: The order of the turns. Starting processes takes longer than all the rest.
ORDER = [0, 1, 2] * 4 + [3] + [0, 1, 2] * 4 + [4]


def survive(out: Path, checkpoint: Path, turn: int, total: int, draw: random.Random, most: int) -> tuple[int, int]:
    """Convert, killed at random until it ends: how often it was killed, and how often it found nothing saved."""
    recipe, options = TURNS[turn]
    kills = anew = 0
    while kills < most:
        if (
            convert_and_kill(checkpoint, out, RECIPES[recipe], draw.randrange(1, total), report=False, **options)
            is not None
        ):
            return kills, anew
        kills += 1
        if out.exists():
            return kills, anew
        anew += not (out.with_name(f"{out.name}.partial") / ".fut_progress" / "progress.json").exists()
        wait_for_lock(out)
    convert(str(checkpoint), out, overrides=RECIPES[recipe], report=False, **options)
    return kills, anew


def wait_for_lock(out: Path) -> None:
    """Wait until the processes of one that was killed are dead, too."""
    while True:
        try:
            return check_unlocked(out)
        except ArtifactError:
            time.sleep(0.05)


def undisturbed(directory: Path) -> tuple[Path, list[int], list[dict[str, bytes]]]:
    """The checkpoint, and of each turn the calls of its conversion and its sealed files; made where they are not."""
    checkpoint, record = directory / "checkpoint", directory / "calls.json"
    if not record.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_checkpoint(checkpoint, CheckpointShape(layers=LAYERS))
        calls = [
            convert_and_kill(checkpoint, directory / f"whole-{number}", RECIPES[recipe], None, report=False, **options)
            for number, (recipe, options) in enumerate(TURNS)
        ]
        record.write_text(json.dumps(calls))
    return checkpoint, json.loads(record.read_text()), [sealed(directory / f"whole-{n}") for n in range(len(TURNS))]


def run(workdir: Path, keep: Path, kills: int, seed: int, most: int, seconds: float) -> dict[str, Any]:
    """Kill so many times, or for so long, and sum up."""
    draw, started = random.Random(seed), time.monotonic()
    checkpoint, totals, expected = undisturbed(keep)
    first = draw.randrange(len(ORDER))
    done = equal = anew = artifacts = 0
    times: Counter[int] = Counter()
    # Where the time is short, each seed begins with another turn.
    while done < kills and time.monotonic() - started < seconds:
        turn = ORDER[(first + artifacts) % len(ORDER)]
        out = workdir / "out"
        killed, nothing_saved = survive(out, checkpoint, turn, totals[turn], draw, min(most, kills - done))
        # Killed behind the renaming, an artifact is whole; what was to go after it goes with the next command.
        clear_behind_renaming(out)
        equal += sealed(out) == expected[turn]
        assert not out.with_name("out.partial").exists()
        shutil.rmtree(out)
        artifacts, done, anew = artifacts + 1, done + killed, anew + nothing_saved
        times[killed] += 1
        print(f"{done} kills, {equal} of {artifacts} artifacts bit-identical", flush=True)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit(), "machine": machine(),
        "seed": seed, "layers": LAYERS, "kills": done, "artifacts": artifacts, "bit_identical": equal,
        "kills_before_anything_was_saved": anew, "kills_of_an_artifact": dict(sorted(times.items())),
        "calls_of_a_conversion": totals, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=1, help="kills of one artifact; 1 gives as many artifacts as kills")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other artifact after so long")
    parser.add_argument("--keep", type=Path, help="directory for the checkpoint and the undisturbed artifacts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-conversions-") as workdir:
        keep = arguments.keep or Path(workdir)
        line = run(Path(workdir), keep, arguments.kills, arguments.seed, arguments.most, arguments.seconds)
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=2))
    if line["bit_identical"] != line["artifacts"]:
        sys.exit("not all artifacts are the same")


if __name__ == "__main__":
    main()
