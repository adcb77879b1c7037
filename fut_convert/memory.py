"""Memory of a conversion: the estimate of the plan, and what was really used."""

from __future__ import annotations

import resource
import sys

import psutil
import torch

from fut_convert.calibration_text import CalibrationWindows
from fut_convert.sources import Source
from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.spec import MODULES

#: Interpreter, PyTorch and the other libraries.
_PROCESS_BYTES = 500_000_000
#: Temporaries of a block of rows in FP32, of reading, writing and hashing.
_WORKING_BYTES = 300_000_000
#: FP32 copies of gate and up that live at once while a batch of calibration windows passes the MLP.
_WIDE_COPIES = 4
_BATCH_BYTES = 1 << 28


def estimate_host_bytes(
    source: Source, manifest: Manifest, windows: CalibrationWindows | None, device: torch.device
) -> int:
    """Peak of the process's memory: one module (with calibration, one layer) read and written, or the embedding."""
    model = manifest.model
    element = 4 if source.dtype not in ("BF16", "F16") else 2
    stored: dict[str, int] = {}
    for tensor in all_tensors(manifest):
        owner = tensor.name.rpartition(".")[0]
        stored[owner] = stored.get(owner, 0) + tensor.nbytes
    read = {m: element * model.module_shape(m)[0] * model.module_shape(m)[1] for m in MODULES}
    written = {m: stored[f"layers.0.{m}"] for m in MODULES}
    # A stacked module exists as parts and as a whole while it is put together; codes exist unpacked and packed.
    module = max(2 * read[m] + 2 * written[m] for m in MODULES)
    embedding = 2 * element * model.vocab_size * model.hidden_size
    peak = max(module, embedding)
    if windows is not None:
        layer = sum(read.values()) + max(read.values()) + 2 * max(written.values())
        if device.type == "cpu":
            hidden = 2 * windows.tokens * model.hidden_size
            wide = 4 * windows.ids.shape[1] * 2 * model.intermediate_size
            layer += 2 * sum(read.values()) // element + hidden + _WIDE_COPIES * max(wide, _BATCH_BYTES)
        peak = max(layer, embedding)
    return _PROCESS_BYTES + _WORKING_BYTES + peak


def available_bytes() -> int:
    """Memory that the operating system calls available."""
    return int(psutil.virtual_memory().available)


def peak_host_bytes() -> int:
    """Largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
