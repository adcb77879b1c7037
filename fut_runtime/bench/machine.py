"""What a line of measurements must say to be compared with another: card, versions, commit, time."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path

import torch

from fut_runtime import __version__

_TREE = Path(__file__).resolve().parents[2]


def machine_facts(device: torch.device) -> dict[str, object]:
    """Facts about this run, ready for JSON."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "futransformer": __version__,
        "commit": source_commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def source_commit(folder: Path = _TREE) -> str | None:
    """Commit of the source tree this runs from, with `+` where it has been changed; None from an installed package."""
    if not (folder / ".git").exists():
        return None
    try:
        name = _git(folder, "rev-parse", "--short", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
