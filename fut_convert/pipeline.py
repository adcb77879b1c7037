"""The conversion, top to bottom: resolve, plan, calibrate and convert layer by layer, seal.

The module is not called `convert`, so that `fut_convert.convert` can be the function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fut_convert.calibration import Calibration, LayerStatistics, calibration_layer, uncalibrated_scales
from fut_convert.checkpoint_model import module_bias, module_gain, module_weight
from fut_convert.errors import ConvertError
from fut_convert.memory import peak_host_bytes
from fut_convert.plan import Plan, make_plan
from fut_convert.quantize.module import quantize_module
from fut_convert.recipe import Recipe, load_recipe
from fut_convert.sources import Source, open_source
from fut_convert.sources.names import EMBEDDING, FINAL_NORM, HEAD
from fut_convert.steps import StepClock
from fut_runtime.artifact.spec import MODULES
from fut_runtime.artifact.writer import ArtifactWriter
from fut_runtime.reference.rotation import sylvester_hadamard

DEFAULT_RECIPE = "rtn"
LOG_FILE = "conversion_log.json"

#: Called as progress(done, total, what): units of work finished, of how many, and what comes next.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion made and what it took.

    Attributes:
        path: the sealed artifact.
        step_seconds: seconds by step: read, calibrate, quantize, write, seal.
        peak_memory_bytes: largest resident set of the process; `peak_device_bytes` the same of the CUDA device.
        module_error: `layers.{i}.{module}.{format}` -> relative error, see `QuantizedModule`.
    """

    path: Path
    plan: Plan
    step_seconds: dict[str, float]
    peak_memory_bytes: int
    peak_device_bytes: int | None
    module_error: dict[str, float]

    @property
    def seconds(self) -> float:
        """Whole time of the conversion."""
        return sum(self.step_seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "path": str(self.path),
            "input_bytes": self.plan.input_bytes,
            "output_bytes": self.plan.output_bytes,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "estimated_memory_bytes": self.plan.memory_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "module_error": self.module_error,
            "warnings": list(self.plan.warnings),
        }


def plan_conversion(
    model: str,
    out: str | Path,
    *,
    recipe: Recipe | str = DEFAULT_RECIPE,
    overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    token: str | None = None,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
) -> Plan:
    """Resolve a model and plan its conversion without doing it; the arguments are those of `convert`."""
    resolved = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    with open_source(model, revision=revision, token=token) as source:
        return make_plan(source, resolved, Path(out), _device(device), overwrite=overwrite)


def convert(
    model: str,
    out: str | Path,
    *,
    recipe: Recipe | str = DEFAULT_RECIPE,
    overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    token: str | None = None,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> ConversionResult:
    """Convert a checkpoint into an artifact.

    Args:
        model: Hub id, checkpoint directory, or `.gguf` file.
        out: directory to create. It appears only when the artifact is whole.
        recipe: a Recipe, the name of one that ships, or a YAML file.
        overrides: dotted recipe keys that replace the recipe's values, e.g. `{"int4.group_size": 64}`; only with a
            recipe given by name or file.
        revision: Hub only: branch, tag or commit; the commit it resolves to is recorded.
        token: Hub only: access token; that of the environment or of the Hub's login when None.
        device: torch device that calibrates and quantizes.
        overwrite: replace an existing artifact, once the new one is whole.
        progress, on_plan: callbacks.

    Raises:
        ConvertError: the model, the recipe or the plan forbids it; ArtifactError: the artifact cannot be written.
    """
    device = _device(device)
    resolved = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    clock = StepClock(device)
    with open_source(model, revision=revision, token=token) as source:
        with clock("plan"):
            plan = make_plan(source, resolved, Path(out), device, overwrite=overwrite)
        if on_plan is not None:
            on_plan(plan)
        plan.require_feasible()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        shard_bytes = int(resolved.max_shard_gb * 1e9)
        with ArtifactWriter(Path(out), plan.manifest, max_shard_bytes=shard_bytes, overwrite=overwrite) as writer:
            conversion = _Conversion(source, plan, writer, device, clock, progress or (lambda *_: None))
            conversion.run()
            with clock("seal"):
                for name, content in plan.side_files:
                    writer.copy_side_file(content, name)
                path = writer.seal()
            result = ConversionResult(
                path=path,
                plan=plan,
                step_seconds=clock.seconds,
                peak_memory_bytes=peak_host_bytes(),
                peak_device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
                module_error=conversion.module_error,
            )
            log = {**result.to_dict(), "path": path.name}
            writer.write_log(LOG_FILE, json.dumps(log, indent=2) + "\n")
    return result


class _Conversion:
    """One pass over the checkpoint, from the embedding to the head."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        writer: ArtifactWriter,
        device: torch.device,
        clock: StepClock,
        progress: Progress,
    ) -> None:
        self.source, self.plan, self.writer, self.device = source, plan, writer, device
        self.clock, self.progress = clock, progress
        self.model = plan.manifest.model
        self.module_error: dict[str, float] = {}
        self.calibration: Calibration | None = None
        self.initial_scales: Tensor | None = None

    def run(self) -> None:
        """Write every tensor."""
        layers = self.model.num_layers
        self.progress(0, layers + 2, "embedding")
        self._embedding()
        for layer in range(layers):
            self.progress(layer + 1, layers + 2, f"layer {layer + 1} of {layers}")
            self._layer(layer)
        self.progress(layers + 1, layers + 2, "head")
        self._head()
        self.progress(layers + 2, layers + 2, "sealing")

    def load(self, name: str) -> Tensor:
        """Read a tensor of the checkpoint."""
        with self.clock("read"):
            return self.source.load(name)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the artifact."""
        with self.clock("write"):
            self.writer.write(name, tensor.contiguous())

    def _embedding(self) -> None:
        embed = self.load(EMBEDDING)
        if self.plan.windows is not None:
            with self.clock("calibrate"):
                self.calibration = Calibration(self.model, self.plan.windows.ids, embed, self.device)
        else:
            self.initial_scales = uncalibrated_scales(self.model, embed, self.plan.recipe.activation.margin)
        self.write("embed", embed.to(torch.bfloat16))
        self.write("hadamard", sylvester_hadamard(self.model.rotation_block))
        self.write("final_norm", self.load(FINAL_NORM).float())

    def _layer(self, layer: int) -> None:
        prefix = f"layers.{layer}"
        gains = {m: g for m in MODULES if (g := module_gain(self.load, layer, m)) is not None}
        self.write(f"{prefix}.attn_norm", gains["qkv"])
        self.write(f"{prefix}.mlp_norm", gains["gate_up"])
        norms = None
        if self.model.qk_norm:
            q_norm, k_norm = (self.load(f"model.layers.{layer}.self_attn.{n}_norm.weight").float() for n in "qk")
            norms = (q_norm, k_norm)
            self.write(f"{prefix}.q_norm", q_norm)
            self.write(f"{prefix}.k_norm", k_norm)
        biases = {m: module_bias(self.load, layer, m) for m in MODULES if self.model.module_bias(m)}
        for module, bias in biases.items():
            self.write(f"{prefix}.{module}.bias", bias)
        if self.calibration is None:
            assert self.initial_scales is not None
            self.write(f"{prefix}.activation_scale", self.initial_scales[layer])
            for module in MODULES:
                self._module(f"{prefix}.{module}", module_weight(self.load, layer, module), gains.get(module), None)
            return
        weights = {m: module_weight(self.load, layer, m) for m in MODULES}
        statistics = self._calibrate(weights, gains, biases, norms)
        self.write(f"{prefix}.activation_scale", statistics.activation_scale(self.plan.recipe.activation.margin))
        for module in MODULES:
            moment = statistics.second_moment[module]
            self._module(f"{prefix}.{module}", weights.pop(module), gains.get(module), moment)

    def _calibrate(
        self,
        weights: Mapping[str, Tensor],
        gains: Mapping[str, Tensor],
        biases: Mapping[str, Tensor],
        norms: tuple[Tensor, Tensor] | None,
    ) -> LayerStatistics:
        assert self.calibration is not None
        with self.clock("calibrate"):
            layer = calibration_layer(weights, gains, biases, norms, self.device)
            statistics = self.calibration.run_layer(layer)
        for site, value in statistics.amax.items():
            if not value < float("inf"):
                raise ConvertError(
                    f"calibration: the input of {site} is not finite; the checkpoint overflows 16 bits, or the "
                    "calibration text drives it there: try another text, or --no-calibration"
                )
        return statistics

    def _module(self, name: str, weight: Tensor, gain: Tensor | None, moment: Tensor | None) -> None:
        specs = self.plan.manifest.weights[name]
        try:
            with self.clock("quantize"):
                done = quantize_module(weight, specs, gain=gain, second_moment=moment, device=self.device)
        except ConvertError as error:
            raise type(error)(f"{name}: {error}") from error
        self.module_error.update({f"{name}.{fmt}": error for fmt, error in done.error.items()})
        for suffix in list(done.tensors):
            self.write(f"{name}.{suffix}", done.tensors.pop(suffix))

    def _head(self) -> None:
        if "head" not in self.plan.manifest.weights:
            return
        moment = None if self.calibration is None else self.calibration.head_second_moment()
        weight = self.load(EMBEDDING if self.model.tie_word_embeddings else HEAD)
        self._module("head", weight, self.load(FINAL_NORM).float(), moment)


def _device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConvertError(f"device {device!r} is unknown, expected cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConvertError(f"device {device!r} is not supported, expected cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConvertError("device cuda: PyTorch sees no CUDA device here; use --device cpu")
    return chosen
