"""A process that runs some of the calibration windows for `fut-convert --calibration-processes`.

`shared_calibration` sends it a `CalibrationSetup` and then commands; sums and codes go through torch.distributed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fut_convert.activation_store import ActivationStore
from fut_convert.calibrated_layers import CalibratedLayers
from fut_convert.checkpoint_model import weight_names
from fut_convert.child_process import die_with, receive, send
from fut_convert.fold_values import folded_parts, folded_weights
from fut_convert.kept_codes import is_kept, load_kept_codes
from fut_convert.lanes import Lanes
from fut_convert.sources import Source, open_source
from fut_convert.sources.names import EMBEDDING, FINAL_NORM
from fut_convert.steps import StepClock
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.paths import MANIFEST_FILE
from fut_runtime.artifact.spec import MODULES
from fut_runtime.errors import FutError

#: Nobody knows how long the first process works at a matrix while the others wait.
_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class CalibrationSetup:
    """What a process needs to know first.

    Attributes:
        parent: the process that it works for.
        checkpoint: where the checkpoint lies.
        manifest: of the artifact, as JSON.
        windows: int64 [windows, tokens], all of them.
        rank, processes: see `Lanes`.
        device: of this process.
        place: where its activations are kept, see `activation_store.PLACES`.
        directory: for those that are kept on the disk.
        rendezvous: a file that does not exist yet, in which the processes find each other.
        saved: files to `restore` from; none where all begins.
        threads: that it may use.
    """

    parent: int
    checkpoint: Path
    manifest: str
    windows: Tensor
    rank: int
    processes: int
    device: str
    place: str
    directory: Path
    rendezvous: Path
    saved: Mapping[str, Path]
    threads: int


def join(setup: CalibrationSetup) -> None:
    """Make the default process group, once all processes are there."""
    # They are all on this host, whose name need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(setup.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    hook = sys.excepthook
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{setup.rendezvous}",
        rank=setup.rank,
        world_size=setup.processes,
        timeout=_TIMEOUT,
    )
    # It marks tracebacks with the rank, also those of whoever calls this package, long after the conversion.
    sys.excepthook = hook


def serve(connection: Connection) -> None:
    """Do what comes until the connection ends."""
    setup: CalibrationSetup = receive(connection)
    die_with(setup.parent)
    torch.set_num_threads(setup.threads)
    try:
        with open_source(str(setup.checkpoint)) as source:
            _serve(connection, setup, source)
    except (FutError, MemoryError, OSError) as error:
        send(connection, error)


def _serve(connection: Connection, setup: CalibrationSetup, source: Source) -> None:
    device, manifest = torch.device(setup.device), Manifest.from_json(setup.manifest, MANIFEST_FILE)

    def room(owner: str, name: str, shape: tuple[int, int, int]) -> ActivationStore:
        path = setup.directory / f"{owner}-{name}-{setup.rank}.work" if setup.place == "disk" else None
        return ActivationStore(shape, device, setup.place, path)

    send(connection, "ready")
    join(setup)
    lanes = Lanes(len(setup.windows), setup.rank, setup.processes)
    embed = None if setup.saved else source.load(EMBEDDING)
    with StepClock(device) as clock:
        layers = CalibratedLayers(manifest, setup.windows, embed, device, room, lanes, clock)
        del embed
        try:
            if setup.saved:
                layers.restore(setup.saved)
            _obey(connection, source, manifest, layers, device)
        finally:
            layers.close()


def _obey(
    connection: Connection, source: Source, manifest: Manifest, layers: CalibratedLayers, device: torch.device
) -> None:
    while True:
        try:
            command, layer = receive(connection)
        except EOFError:
            return
        if command == "layer":
            weights = folded_weights(source.load, manifest, layer)
            kept = {}
            for module in MODULES if layers.gptq is not None else ():
                spec = manifest.weights[f"layers.{layer}.{module}"]["int4"]
                if is_kept(spec):
                    kept[module] = load_kept_codes(source, weight_names(layer, module), spec, device)
            layers.layer(layer, weights, folded_parts(source.load, manifest, layer), kept)
        elif command == "save":
            layers.send_saved()
        else:
            layers.head_moment()
            head = manifest.weights["head"].get("int4")
            if layers.gptq is not None and head is not None and not is_kept(head):
                layers.gptq.head_hessian(source.load(FINAL_NORM).float())
