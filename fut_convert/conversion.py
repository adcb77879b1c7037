"""One pass over the checkpoint, from the embedding to the head: calibrate, quantize and write layer by layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fut_convert.activation_store import ActivationStore
from fut_convert.calibrated_layers import CalibratedLayers
from fut_convert.calibration import uncalibrated_scales
from fut_convert.calibration_process import CalibrationSetup
from fut_convert.checkpoint_model import Rows, rows_of, stacked_rows, weight_names
from fut_convert.fold_values import folded_parts, folded_weights
from fut_convert.job_process import LayerDone
from fut_convert.kept_codes import head_name
from fut_convert.lanes import Lanes
from fut_convert.layer_jobs import LayerJobs
from fut_convert.module_conversion import LayerWork, ModuleConverter
from fut_convert.plan import Plan
from fut_convert.quantize.module import Int4Codes
from fut_convert.read_ahead import ReadAhead
from fut_convert.reading_order import EMBEDDING_STEP, layer_step
from fut_convert.resume import LAYERS, LAYERS_DONE, SavePace
from fut_convert.shared_calibration import SharedCalibration
from fut_convert.sources import Source
from fut_convert.sources.names import EMBEDDING, FINAL_NORM
from fut_convert.steps import StepClock
from fut_convert.workers import Workers
from fut_runtime.artifact.layout import weight_tensors
from fut_runtime.artifact.manifest import WEIGHT_FORMATS
from fut_runtime.artifact.progress import Progress as SavedProgress
from fut_runtime.artifact.spec import MODULES
from fut_runtime.artifact.writer import ArtifactWriter
from fut_runtime.reference.rotation import sylvester_hadamard

#: Numbers of the embedding that are copied at once.
_TILE = 1 << 20

#: Called as progress(done, total, what): units of work finished, of how many, and what comes next. What the report
#: measures after the sealing is counted anew.
Progress = Callable[[int, int, str], None]


class Conversion:
    """One pass over the checkpoint, from the embedding to the head."""

    def __init__(
        self,
        source: Source,
        reader: ReadAhead,
        plan: Plan,
        writer: ArtifactWriter,
        workers: Workers,
        device: torch.device,
        clock: StepClock,
        progress: Progress,
    ) -> None:
        self.source, self.reader = source, reader
        self.plan, self.writer, self.workers, self.device = plan, writer, workers, device
        self.clock, self.progress = clock, progress
        self.model = plan.manifest.model
        self.module_error: dict[str, float] = {}
        self.calibrated: CalibratedLayers | None = None
        self.shared: SharedCalibration | None = None
        #: That run the calibration windows.
        self.processes = 1
        self.embed_amax = 0.0
        self.outcomes_before: dict[str, dict[str, Any]] = {}
        self.converter = ModuleConverter(source, plan.manifest, writer.write_rows, workers, device, clock)
        #: Processes that convert layers, where there are any; they report to `layer_done`.
        self.jobs: LayerJobs | None = None

    def __enter__(self) -> Conversion:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shared is not None:
            self.shared.close()
        if self.calibrated is not None:
            self.calibrated.close()

    @property
    def first_step(self) -> int:
        """The first step that no interrupted conversion has done; see `ReadingOrder`."""
        saved = self.writer.resumed
        if saved is None:
            return EMBEDDING_STEP
        return layer_step(saved.state[LAYERS_DONE]) + (1 if saved.state["head_done"] else 0)

    def run(self) -> None:
        """Write every tensor that no interrupted conversion has written."""
        layers = self.model.num_layers
        saved = self.writer.resumed
        pace = SavePace()
        if saved is None:
            self.progress(0, layers + 2, "embedding")
            self._enter(EMBEDDING_STEP)
            self._embedding()
        else:
            self._resume(saved)
        for layer in range(0 if saved is None else saved.state[LAYERS_DONE], layers):
            self.progress(layer + 1, layers + 2, f"layer {layer + 1} of {layers}")
            self._enter(layer_step(layer))
            self._layer(layer)
            if pace.due:
                with pace.saving():
                    self._wait_for_jobs()
                    with self.clock("save"), self._together("save"):
                        self.writer.save(self._state(layer + 1), self._tensors())
        self.progress(layers + 1, layers + 2, "head")
        if saved is None or not saved.state["head_done"]:
            self._enter(layer_step(layers))
            self._head()
            self._wait_for_jobs()
            with self.clock("save"):
                self.writer.save(self._state(layers, head_done=True))
        self._enter(layer_step(layers) + 1)
        self.progress(layers + 2, layers + 2, "sealing")

    def _enter(self, step: int) -> None:
        """Have what a step reads here, where the checkpoint comes while it is converted."""
        if self.plan.stream is not None:
            with self.clock("fetch"):
                self.source.enter(step)

    def _wait_for_jobs(self) -> None:
        if self.jobs is not None:
            with self.clock("wait"):
                self.jobs.drain()

    @property
    def outcomes(self) -> dict[str, dict[str, Any]]:
        """How GPTQ's codes came about, by module; see `GptqLayers`."""
        gptq = None if self.calibrated is None else self.calibrated.gptq
        return self.outcomes_before if gptq is None else {**self.outcomes_before, **gptq.outcomes}

    def _state(self, layers_done: int, *, head_done: bool = False) -> dict[str, Any]:
        """What `_resume` needs, besides the tensors."""
        return {
            LAYERS_DONE: layers_done,
            LAYERS: self.model.num_layers,
            "head_done": head_done,
            "module_error": self.module_error,
            "gptq": self.outcomes,
            "embed_amax": self.embed_amax,
        }

    def _tensors(self) -> dict[str, Iterable[Tensor]]:
        """The calibration windows' hidden states after the layers that are done."""
        if self.calibrated is None:
            return {}
        return {name: self.calibrated.saved(name) for name in self.calibrated.holders()}

    def _resume(self, saved: SavedProgress) -> None:
        """Take up what an interrupted conversion saved."""
        self.module_error = dict(saved.state["module_error"])
        self.embed_amax = saved.state["embed_amax"]
        self.outcomes_before = saved.state["gptq"]
        # After the head nothing is left that would need them.
        if saved.files:
            self._begin_calibration(None, {name: self.writer.saved_file(name) for name in saved.files})

    def load(self, name: str) -> Tensor:
        """Read a tensor of the checkpoint."""
        with self.clock("read"):
            return self.reader.load(name)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the artifact."""
        with self.clock("write"):
            self.writer.write(name, tensor.contiguous())

    def _embedding(self) -> None:
        if self.plan.windows is not None:
            self._begin_calibration(self.load(EMBEDDING))
        rows = stacked_rows(self.source, [EMBEDDING])
        vocab, hidden = self.model.vocab_size, self.model.hidden_size
        step = max(1, _TILE // hidden)

        def copy(start: int) -> float:
            with self.clock("read"):
                tile = rows(start, min(start + step, vocab))
            with self.clock("write"):
                self.writer.write_rows("embed", start, tile.to(torch.bfloat16))
            return float(torch.maximum(tile.amax(), -tile.amin()))

        self.embed_amax = max(self.workers.map(copy, range(0, vocab, step)))
        self.write("hadamard", sylvester_hadamard(self.model.rotation_block))
        self.write("final_norm", self.load(FINAL_NORM).float())

    def _begin_calibration(self, embed: Tensor | None, saved: Mapping[str, Path] | None = None) -> None:
        """Calibrate from the embedding on, or from hidden states that were saved."""
        if self.plan.windows is None:
            return
        ids = self.plan.windows.ids
        processes = Lanes.processes(len(ids), self.processes)
        lanes = Lanes(len(ids), 0, processes)
        if processes > 1:
            setup = CalibrationSetup(
                parent=os.getpid(), checkpoint=self.source.location, manifest=self.plan.manifest.to_json(), windows=ids,
                rank=0, processes=processes, device=str(self.device), place=self.plan.memory.place,
                directory=self.writer.work_file("x").parent, rendezvous=self.writer.work_file("rendezvous"),
                saved=saved or {}, threads=max(1, torch.get_num_threads() // processes),
            )  # fmt: skip
            self.shared = SharedCalibration(setup, (self.writer.lock,))
        manifest, room = self.plan.manifest, self._room
        self.calibrated = CalibratedLayers(manifest, ids, embed, self.device, room, lanes, self.clock)
        if saved is not None:
            self.calibrated.restore(saved)

    def _room(self, owner: str, name: str, shape: tuple[int, int, int]) -> ActivationStore:
        """Room for activations where the plan has them."""
        place = self.plan.memory.place
        path = self.writer.work_file(f"{owner}-{name}") if place == "disk" else None
        return ActivationStore(shape, self.device, place, path)

    def _layer(self, layer: int) -> None:
        prefix = f"layers.{layer}"
        parts = folded_parts(self.load, self.plan.manifest, layer)
        self.write(f"{prefix}.attn_norm", parts.gains["qkv"])
        self.write(f"{prefix}.mlp_norm", parts.gains["gate_up"])
        for name, norm in zip("qk", parts.head_norms or (), strict=False):
            self.write(f"{prefix}.{name}_norm", norm)
        for module, bias in parts.biases.items():
            self.write(f"{prefix}.{module}.bias", bias)
        if self.calibrated is None:
            scales = uncalibrated_scales(self.model, self.embed_amax, self.plan.recipe.activation.margin)
            self.write(f"{prefix}.activation_scale", scales[layer])
            work = LayerWork(layer, frozenset(WEIGHT_FORMATS), None)
            if self.jobs is not None:
                self.jobs.submit(work)
            else:
                self.module_error |= self.converter.layer(work)
            return
        weights = folded_weights(self.load, self.plan.manifest, layer)
        self.reader.announce(layer + 1)
        # Other processes read the checkpoint's codes themselves, and choose none of GPTQ's, which depend on what came
        # before.
        theirs: frozenset[str] = frozenset()
        if self.jobs is not None:
            theirs = frozenset(WEIGHT_FORMATS) - ({"int4"} if self.calibrated.gptq is not None else set())
        ours = {m: [f for f in self.converter.formats(f"{prefix}.{m}") if f not in theirs] for m in MODULES}
        brought = {
            m: self.converter.kept_codes(f"{prefix}.{m}", weight_names(layer, m)) for m in MODULES if "int4" in ours[m]
        }
        kept = {module: codes for module, codes in brought.items() if codes is not None}
        with self._together("layer", layer):
            chosen, statistics = self.calibrated.layer(layer, weights, parts, kept)
        self.write(f"{prefix}.activation_scale", statistics.activation_scale(self.plan.recipe.activation.margin))
        if self.jobs is not None:
            self.jobs.submit(LayerWork(layer, theirs, statistics.second_moment))
        for module, formats in ours.items():
            rows, moment = rows_of(weights.pop(module)), statistics.second_moment[module]
            if formats:
                codes = chosen.pop(module, None)
                self._module(f"{prefix}.{module}", rows, parts.gains.get(module), moment, codes, formats)

    @contextmanager
    def _together(self, command: str, layer: int = 0) -> Iterator[None]:
        """Work with those who share the calibration windows, if any do."""
        if self.shared is None:
            yield
            return
        with self.shared.working():
            self.shared.tell(command, layer)
            yield

    def _module(
        self,
        name: str,
        rows: Rows,
        gain: Tensor | None,
        moment: Tensor | None,
        int4: Int4Codes | None,
        formats: Collection[str] | None = None,
    ) -> None:
        """Convert a module here, and note its errors; see `ModuleConverter.convert`."""
        self.module_error |= self.converter.convert(name, rows, gain, moment, int4, formats)
        if name in self.outcomes:
            self.module_error[f"{name}.int4"] = self.outcomes[name]["weighted_error"] ** 0.5

    def layer_done(self, work: LayerWork, done: LayerDone) -> None:
        """Count what a process has written."""
        self.module_error |= done.errors
        self.clock.add(done.seconds)
        with self.clock("write"):
            for module in MODULES:
                name = f"layers.{work.layer}.{module}"
                for weight_format, spec in self.plan.manifest.weights[name].items():
                    if weight_format in work.formats:
                        self.writer.count_written(tensor.name for tensor in weight_tensors(name, spec))

    def _head(self) -> None:
        if "head" not in self.plan.manifest.weights:
            return
        matrices = [head_name(self.model)]
        rows = stacked_rows(self.source, matrices)
        gain, chosen = self.load(FINAL_NORM).float(), self.converter.kept_codes("head", matrices)
        moment = None
        if self.calibrated is not None:
            with self._together("head"):
                moment, gptq = self.calibrated.head_moment(), self.calibrated.gptq
                if chosen is None and gptq is not None and "int4" in self.plan.manifest.weights["head"]:
                    with self.clock("gptq"):
                        chosen = gptq.head(rows(0, self.model.vocab_size), gain)
        self._module("head", rows, gain, moment, chosen)
