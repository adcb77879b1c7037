"""What a conversion needs of a CUDA device's memory, step by step, and where its calibration activations fit.

Counted are the tensors that live at once when a step is at its fullest, as PyTorch's allocator counts them
(`torch.cuda.max_memory_allocated`). CUDA's own context comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fut_convert.calibration import windows_at_once
from fut_convert.lanes import LANES, Lanes
from fut_convert.quantize.gptq import error_chunk
from fut_convert.quantize.module import block_weights
from fut_convert.quantize.scales import search_chunk
from fut_convert.recipe import GptqRecipe, corrects
from fut_runtime.artifact.manifest import Manifest, WeightSpec
from fut_runtime.artifact.spec import MODULES, ModelSpec

#: Workspaces of the matrix libraries.
_LIBRARY_BYTES = 100_000_000
#: Bytes a weight takes while a block of rows is quantized and packed: as read, FP32, folded, and four temporaries.
_BLOCK_BYTES = 18
#: Bytes a weight takes in GPTQ: FP32 weights and their copy in the solver's order, codes, levels, errors.
_SOLVER_BYTES = 17
#: Bytes a weight of a chunk takes while scales are searched, beside its FP32 value.
_SEARCH_BYTES = 12.4
#: Bytes an entry of a Hessian takes: itself in FP32; while it is summed up; while it is factorised (two in FP64 beside
#: it); while the columns are solved or gone over again (one in FP32 beside it).
_HESSIAN_BYTES, _SUMMED_BYTES, _FACTORISED_BYTES, _SOLVED_BYTES = 4, 8, 20, 8
#: FP64 numbers of the chunks in which errors are summed: a panel of the Hessian, and three times rows of weights.
_ERROR_BYTES = 32


@dataclass(frozen=True)
class DeviceMemory:
    """Peak of each step.

    Attributes:
        steps: step -> bytes without the activations of all windows.
        resident: bytes of those activations that live in every step: hidden states.
        attended: bytes of those that live only while `qkv` and `o` are quantized by GPTQ.
        middle: bytes of those that live while all modules are: the checkpoint's own in mid-layer.
        added: bytes of those that live only while `gate_up` and `down` are: what the checkpoint's `down` adds.
    """

    steps: Mapping[str, int]
    resident: int
    attended: int
    middle: int
    added: int

    @property
    def activation_bytes(self) -> int:
        """All activations of all windows that live at once."""
        return self.resident + self.middle + max(self.attended, self.added)

    def peak(self, place: str) -> int:
        """Peak with the activations of all windows in a place, one of PLACES."""
        if place != "device":
            return max(self.steps.values())
        beside = {
            "report": -self.resident,
            "gptq qkv": self.attended + self.middle,
            "gptq o": self.attended + self.middle,
            "gptq gate_up": self.middle + self.added,
            "gptq down": self.middle + self.added,
        }
        return max(size + self.resident + beside.get(step, 0) for step, size in self.steps.items())


def device_memory(
    manifest: Manifest,
    windows: tuple[int, int] | None,
    device: torch.device,
    report_bytes: int = 0,
    processes: int = 1,
) -> DeviceMemory:
    """What a conversion takes on a device.

    Args:
        windows: number of calibration windows and tokens of each; None without calibration.
        report_bytes: what the report takes, when everything else is given back; 0 without one.
        processes: that share the windows, each with a device of its own: this is about the first.
    """
    model = manifest.model
    sizes = {name: rows * cols for name, (rows, cols) in ((m, model.module_shape(m)) for m in (*MODULES, "head"))}
    largest = max(sizes[m] for m in (*MODULES, *(["head"] if "head" in manifest.weights else [])))
    block = _BLOCK_BYTES * min(block_weights(device), largest)
    codes = gptq_specs(manifest)
    report = {"report": _LIBRARY_BYTES + report_bytes} if report_bytes else {}
    if windows is None:
        return DeviceMemory({"quantize": _LIBRARY_BYTES + block, **report}, 0, 0, 0, 0)
    count, tokens = windows
    batch = tokens * min(-(-count // LANES), windows_at_once(model, tokens, device))
    several = count > 1
    count = Lanes(count, 0, processes).count
    layer = 2 * sum(sizes[m] for m in MODULES)
    chosen = sum(_code_bytes(spec) for spec in codes.values())
    steps = {"quantize": block + chosen}
    corrected = bool(codes) and _corrected(manifest)
    if not corrected:
        # Else the checkpoint's layer runs beside GPTQ's.
        steps["calibrate"] = layer + chosen + _forward(model, batch)
    # The checkpoint's layer in BF16, then what takes its place.
    held = layer
    for module, spec in codes.items():
        steps[f"gptq {module}"] = held + _gptq(model, module, spec, batch, device, corrected, several)
        held += 2 * sizes[module] + _code_bytes(spec)
    head = manifest.weights.get("head", {}).get("int4")
    if head is not None and head.method == "gptq":
        steps["gptq head"] = _gptq(model, "head", head, batch, device, False, several)
    hidden = 2 * count * tokens * model.hidden_size
    attended = 2 * count * tokens * model.module_shape("o")[1] if codes else 0
    sizes_of_steps = {step: _LIBRARY_BYTES + size for step, size in steps.items()}
    beside = hidden if corrected else 0
    return DeviceMemory({**sizes_of_steps, **report}, hidden * (2 if codes else 1), attended, beside, beside)


def gptq_specs(manifest: Manifest) -> dict[str, WeightSpec]:
    """INT4 format of each module whose codes GPTQ chooses, in the layer where it takes most."""
    largest: dict[str, WeightSpec] = {}
    for module in MODULES:
        stored = (manifest.weights[f"layers.{i}.{module}"].get("int4") for i in range(manifest.model.num_layers))
        specs = [spec for spec in stored if spec is not None and spec.method == "gptq"]
        if specs:
            largest[module] = max(specs, key=lambda spec: (spec.padded_shape[1], -(spec.group_size or 0)))
    return largest


def _corrected(manifest: Manifest) -> bool:
    """Whether GPTQ sees the checkpoint's own layers beside the quantized ones."""
    settings = manifest.recipe.get("gptq")
    return settings is not None and corrects(GptqRecipe(**settings))


def _code_bytes(spec: WeightSpec) -> int:
    rows, cols = spec.shape[0], spec.padded_shape[1]
    return rows * cols + 2 * rows * cols // (spec.group_size or 1)


def _forward(model: ModelSpec, tokens: int) -> int:
    """A batch's activations while its MLP runs, or its attention where that is wider."""
    heads = model.module_shape("qkv")[0]
    mlp = 16 * model.intermediate_size + 8.6 * model.hidden_size
    attention = 6 * heads + 21 * max(model.hidden_size, model.module_shape("o")[1])
    # Its own hidden states, in BF16, where they are not on the device already.
    return int(tokens * (max(mlp, attention) + 2 * model.hidden_size))


def _gptq(
    model: ModelSpec,
    module: str,
    spec: WeightSpec,
    tokens: int,
    device: torch.device,
    corrected: bool,
    several: bool,
) -> int:
    """Peak while GPTQ works on a module: its Hessian is summed up, or its codes are chosen.

    `several`: there are several lanes, whose sums are added up beside the sum of the lane that runs.
    """
    rows, cols = spec.shape[0], spec.padded_shape[1]
    weights, entries = rows * cols, cols * cols
    chunk = error_chunk(device)
    summed = max(_SUMMED_BYTES * entries + 6 * tokens * cols, _HESSIAN_BYTES * entries + _forward(model, tokens))
    chosen = max(
        _SOLVED_BYTES * entries + _SOLVER_BYTES * weights,
        _HESSIAN_BYTES * entries + 4 * weights + int(_SEARCH_BYTES * min(weights, search_chunk(device))),
        _HESSIAN_BYTES * entries + 7 * weights + _ERROR_BYTES * min(chunk, max(weights, entries)),
    )
    # The factor stays until the codes are chosen.
    chosen += 4 * entries
    factorised = _FACTORISED_BYTES * entries + 5 * weights
    if corrected:
        # t and its mean product with x beside the Hessian; FP32 residual streams whose difference t makes good for.
        means = 4 * (entries + weights)
        summed = max(
            means + 4 * max(entries, weights) + 6 * tokens * (rows + cols),
            means + _forward(model, tokens) + 12 * tokens * model.hidden_size,
        )
        # That mean stays; the correction itself takes four FP32 copies of the weights.
        moved = _SOLVED_BYTES * entries + 20 * weights
        chosen = max(chosen + 4 * weights, moved)
        factorised += 4 * weights
    if several:
        summed += 4 * (entries + (weights if corrected else 0))
    return max(summed, factorised, chosen)
