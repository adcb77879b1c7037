"""Memory of a conversion: the estimate of the plan, and what was really used."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

from fut_convert.calibration import windows_at_once
from fut_convert.calibration_text import CalibrationWindows
from fut_convert.device_memory import gptq_specs
from fut_convert.fold_values import FOLDED_MODULES
from fut_convert.quantize.module import block_weights
from fut_convert.reading_order import ReadingOrder
from fut_convert.sources import Source
from fut_convert.sources.names import HEAD
from fut_convert.workers import worker_count
from fut_runtime.artifact.layout import layer_tensors
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.evaluate.perplexity import LOGIT_ROWS
from fut_runtime.evaluate.streamed import windows_at_once as windows_at_once_streamed

#: Interpreter, PyTorch and the other libraries; CUDA's libraries and context come on top.
_PROCESS_BYTES = 310_000_000
_CUDA_BYTES = 1_500_000_000
#: A thread's buffers for reading, writing and hashing.
_WORKER_BYTES = 15_000_000
#: Bytes that a weight of a block takes in host memory while it is read, quantized on a CPU and written.
_CPU_BLOCK_BYTES = 32
_GPU_BLOCK_BYTES = 8
#: FP32 copies of gate and up that live at once while a batch of calibration windows passes the MLP on a CPU.
_WIDE_COPIES = 5
#: What malloc keeps of calibration's blocks: those of less than 32 MB come from heaps that seldom shrink.
_HEAP_BYTES = 100_000_000
#: Bytes that a tokenizer takes for an entry of its vocabulary.
_TOKEN_BYTES = 800
#: While GPTQ works on a module: bytes an entry of its Hessian takes (FP64 factors), and bytes a weight takes.
_HESSIAN_BYTES = 28
_SOLVER_BYTES = 20
#: Bytes a weight takes while a matrix is read or dequantised to run it, and copies of logits while they are scored.
_MATRIX_BYTES = 14
_LOGIT_COPIES = 5
#: Bytes a weight of the widest module takes while a quantized checkpoint's matrices are dequantized as a whole, and
#: what the codes of all modules of a layer add where they are kept.
_DEQUANTIZED_BYTES = 10
_KEPT_BYTES = 6
#: A part of a file that comes from the Hub, twice while it is received, and the Hub's client.
_STREAM_BYTES = 110_000_000
#: The library that draws the report's plots.
_PLOT_BYTES = 60_000_000
#: The solver's libraries, and the rows whose error it sums in FP64.
_SOLVER_FIXED_BYTES = 150_000_000


def estimate_host_bytes(
    source: Source,
    manifest: Manifest,
    windows: CalibrationWindows | None,
    device: torch.device,
    place: str,
    *,
    depth: CalibrationWindows | None = None,
    evaluation: CalibrationWindows | None = None,
) -> int:
    """Peak of the process's memory: blocks of rows, and with calibration the embedding or a layer with its states.

    Args:
        place: where the activations of all calibration windows are kept, one of `activation_store.PLACES`.
        depth, evaluation: what the report measures on afterwards, when all that is given back.
    """
    model = manifest.model
    weights = _module_weights(model)
    block = min(block_weights(device), max(weights.values()))
    on_cpu = device.type == "cpu"
    workers = worker_count(device)
    fixed = _PROCESS_BYTES + workers * (_WORKER_BYTES + (_CPU_BLOCK_BYTES if on_cpu else _GPU_BLOCK_BYTES) * block)
    if not on_cpu:
        fixed += _CUDA_BYTES
    if source.stream_plan(ReadingOrder(manifest)) is not None:
        fixed += _STREAM_BYTES
    element = 2 if source.dtype in ("BF16", "F16") else 4
    reported = _report_host_bytes(element, manifest, device, depth, evaluation)
    if source.quantized:
        # With calibration a layer is in memory anyway, and the codes that are kept beside it.
        widest = max(weights.values())
        fixed += (_DEQUANTIZED_BYTES if windows is None else _KEPT_BYTES) * widest
        if HEAD in source.quantized:
            fixed += _DEQUANTIZED_BYTES * max(0, model.vocab_size * model.hidden_size - widest)
    if windows is not None or evaluation is not None:
        fixed += _TOKEN_BYTES * model.vocab_size
    if windows is None:
        return fixed + reported
    if on_cpu:
        fixed += _HEAP_BYTES
    # A stacked module exists in parts and as a whole while it is put together.
    layer = element * (sum(weights.values()) + max(weights.values()))
    if manifest.kv_cache.v_folded:
        # What the rotation changes is kept in FP32.
        layer += 4 * sum(weights[module] for module in FOLDED_MODULES)
    if not on_cpu:
        # The layer that is read ahead.
        layer += element * sum(weights.values())
    if on_cpu:
        count, tokens = windows.ids.shape
        if source.dtype != "BF16":
            layer += 2 * sum(weights.values())
        wide = 4 * tokens * 2 * model.intermediate_size
        wide *= _WIDE_COPIES * min(count, windows_at_once(model, tokens, device))
        solver = _solver_bytes(manifest)
        if solver:
            # The layer's codes, and it in BF16.
            layer += 3 * sum(weights.values())
        layer += max(wide, solver)
    if place == "host" or (on_cpu and place == "device"):
        layer += 2 * windows.tokens * model.hidden_size
        if _solver_bytes(manifest):
            # The states behind the quantized layers, the checkpoint's own in mid-layer, and what the former attended to
            # or the latter's MLP adds.
            layer += 2 * windows.tokens * (2 * model.hidden_size + max(model.module_shape("o")[1], model.hidden_size))
    embedding = element * model.vocab_size * model.hidden_size
    return fixed + max(layer, embedding, reported)


def job_threads(jobs: int) -> int:
    """Threads of each of so many processes that convert layers side by side."""
    return max(1, torch.get_num_threads() // jobs)


def job_bytes(source: Source, manifest: Manifest, jobs: int) -> int:
    """What the processes take that convert layers side by side; nothing where there is only this one."""
    if jobs == 1:
        return 0
    weights = _module_weights(manifest.model)
    block = min(block_weights(torch.device("cpu")), max(weights.values()))
    one = _PROCESS_BYTES + (job_threads(jobs) + 1) * (_WORKER_BYTES + _CPU_BLOCK_BYTES * block)
    if source.quantized:
        one += _DEQUANTIZED_BYTES * max(weights.values())
    return jobs * one


def report_bytes(
    manifest: Manifest,
    device: torch.device,
    *,
    depth: CalibrationWindows | None,
    evaluation: CalibrationWindows | None,
) -> int:
    """What running single layers of the checkpoint and of the artifact takes where they run, for depth and accuracy."""
    if depth is None and evaluation is None:
        return 0
    model = manifest.model
    matrix = max(_module_weights(model).values())
    widest, states = 0, 0
    if depth is not None:
        widest = 2 * depth.tokens
        states = 4 * 4 * depth.tokens * model.hidden_size
    if evaluation is not None:
        count, tokens = evaluation.ids.shape
        widest = max(widest, tokens * min(count, windows_at_once_streamed(model, tokens, device)))
        states = max(states, 2 * 4 * evaluation.tokens * model.hidden_size + 8 * model.vocab_size * model.hidden_size)
        states += _LOGIT_COPIES * 4 * LOGIT_ROWS * model.vocab_size
    return _MATRIX_BYTES * matrix + _WIDE_COPIES * 4 * widest * 2 * model.intermediate_size + states


def _report_host_bytes(
    element: int,
    manifest: Manifest,
    device: torch.device,
    depth: CalibrationWindows | None,
    evaluation: CalibrationWindows | None,
) -> int:
    """What the report takes of the process's memory, from a checkpoint of `element` bytes a weight."""
    if depth is None and evaluation is None:
        return 0
    model = manifest.model
    embedding = element * model.vocab_size * model.hidden_size
    matrix = max(_module_weights(model).values())
    # The artifact's pages are given back layer by layer.
    fixed = _PLOT_BYTES + sum(tensor.nbytes for tensor in layer_tensors(manifest, 0))
    if device.type != "cpu":
        return fixed + 2 * max(element * matrix, embedding)
    running = report_bytes(manifest, device, depth=depth, evaluation=evaluation)
    return fixed + max(running, _MATRIX_BYTES * matrix + embedding)


def _module_weights(model: ModelSpec) -> dict[str, int]:
    """Weights of each module of a layer."""
    return {m: model.module_shape(m)[0] * model.module_shape(m)[1] for m in MODULES}


def _solver_bytes(manifest: Manifest) -> int:
    """What GPTQ needs beside a layer for the module that needs most, 0 without it."""
    shapes = [spec.padded_shape for spec in gptq_specs(manifest).values()]
    if not shapes:
        return 0
    largest = max(_HESSIAN_BYTES * cols * cols + _SOLVER_BYTES * rows * cols for rows, cols in shapes)
    return _SOLVER_FIXED_BYTES + largest


def available_bytes() -> int:
    """Memory that the operating system calls available."""
    return int(psutil.virtual_memory().available)


def peak_host_bytes() -> int:
    """Largest resident set of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage also counts what the parent held when it started this process.
        peak = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if peak is not None:
            return int(peak.split()[1]) * 1024
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_rss if sys.platform == "darwin" else peak_rss * 1024
