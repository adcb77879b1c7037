"""How much of the files in a directory is mapped into this process's memory, and there."""

from __future__ import annotations

from pathlib import Path


def mapped_kilobytes(directory: Path) -> int:
    """Resident kB of all mappings of files below a directory (Linux)."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            ours = str(directory) in line
        elif ours and key == "Rss:":
            total += int(rest[0])
    return total
