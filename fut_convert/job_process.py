"""A process that converts layers for `fut-convert --jobs`: it reads the checkpoint and writes into the shards itself.

`layer_jobs` sends it a `JobSetup` and then one `LayerWork` after the other, and receives a `LayerDone` or an exception
for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from fut_convert.child_process import die_with, receive, send
from fut_convert.memory import peak_host_bytes
from fut_convert.module_conversion import LayerWork, ModuleConverter
from fut_convert.sources import open_source
from fut_convert.steps import StepClock
from fut_convert.workers import Workers, worker_count
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.paths import MANIFEST_FILE
from fut_runtime.artifact.shard_rows import ShardRows
from fut_runtime.errors import FutError


@dataclass(frozen=True)
class JobSetup:
    """What a process needs to know first.

    Attributes:
        parent: the process that it works for.
        checkpoint: where the checkpoint lies.
        manifest: of the artifact, as JSON.
        base: where its shards are.
        max_shard_bytes: as the writer has it.
        threads: that it may use.
    """

    parent: int
    checkpoint: Path
    manifest: str
    base: Path
    max_shard_bytes: int
    threads: int


@dataclass(frozen=True)
class LayerDone:
    """A layer that is converted.

    Attributes:
        errors: `name.format` -> relative error.
        seconds: by step, of this layer.
        peak_bytes: most memory of the process so far.
    """

    errors: dict[str, float]
    seconds: dict[str, float]
    peak_bytes: int


def serve(connection: Connection) -> None:
    """Convert what comes until the connection ends."""
    setup: JobSetup = receive(connection)
    die_with(setup.parent)
    torch.set_num_threads(setup.threads)
    cpu = torch.device("cpu")
    manifest = Manifest.from_json(setup.manifest, MANIFEST_FILE)
    with open_source(str(setup.checkpoint)) as source, Workers(worker_count(cpu)) as workers:
        rows = ShardRows(setup.base, manifest, setup.max_shard_bytes)
        while True:
            try:
                work: LayerWork = receive(connection)
            except EOFError:
                return
            with StepClock(cpu) as clock:
                converter = ModuleConverter(source, manifest, rows.write_rows, workers, cpu, clock)
                try:
                    errors = converter.layer(work)
                except (FutError, MemoryError, OSError) as error:
                    send(connection, error)
                    return
            send(connection, LayerDone(errors, clock.seconds, peak_host_bytes()))
