"""The plan of a conversion: what will be written, how big, with how much memory, and what stands against it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fut_convert.calibration_text import CalibrationWindows, calibration_windows, tokenizer_warnings
from fut_convert.errors import PreflightError
from fut_convert.evaluation_text import evaluation_windows
from fut_convert.fold_values import FOLDED_MODULES
from fut_convert.group_sizes import idle_overrides
from fut_convert.kept_codes import KeptModules, is_kept, plan_kept_codes
from fut_convert.manifest import build_manifest
from fut_convert.memory_budget import MemoryBudget, MemoryPlan, plan_memory
from fut_convert.plan_rows import ModuleRow, module_rows, padding_warnings
from fut_convert.quantize.auto_gptq import auto_gptq_problem
from fut_convert.reading_order import ReadingOrder
from fut_convert.recipe import AUTO, Recipe, uses_gptq
from fut_convert.report.options import ReportOptions, depth_windows
from fut_convert.report.wording import PLOTS
from fut_convert.sources import SideFile, Source
from fut_convert.sources.read_errors import read_errors
from fut_convert.sources.stream_plan import StreamPlan
from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.paths import (
    CARD_FILE,
    REPORT_DATA_FILE,
    REPORT_FILE,
    SOURCE_CARD_FILE,
    check_foreign_name,
    side_file_name,
)
from fut_runtime.artifact.staging import check_outside, check_target, staged_bytes
from fut_runtime.errors import ArtifactError

#: Report of the conversion, beside the sealed files.
LOG_FILE = "conversion_log.json"
#: Below this many calibration tokens the statistics are noisy.
RECOMMENDED_CALIBRATION_TOKENS = 65_536
#: Below this many most of what the statistics show is chance.
LEAST_CALIBRATION_TOKENS = 8_192
_DEFAULT_REPORT = ReportOptions()


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before any work.

    Attributes:
        manifest: the artifact's manifest, complete.
        rows: storage of each kind of module.
        output_bytes: data of all tensors and side files.
        free_bytes: free disk space where the artifact goes, with what an interrupted conversion has taken of it, and
            without what the weights will take that have yet to be fetched.
        memory: what will be used of the host's and the device's, and where calibration keeps its activations.
        scratch_bytes: disk space needed beside the artifact until it is sealed.
        warnings, errors: complete messages; any error forbids the conversion.
        notes: what is done with the checkpoint's own INT4 codes.
        depth: windows to measure the error through the depth on, for the report.
        evaluation: windows to measure the artifact's accuracy on, where a text was given.
        stream: how the weights come from the Hub while they are converted, where they do.
        fetch_bytes: of weights that have yet to be fetched into the Hub's cache before the conversion.
    """

    manifest: Manifest
    recipe: Recipe
    rows: tuple[ModuleRow, ...]
    input_bytes: int
    output_bytes: int
    free_bytes: int
    memory: MemoryPlan
    scratch_bytes: int
    side_files: tuple[SideFile, ...]
    windows: CalibrationWindows | None
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    notes: tuple[str, ...] = ()
    depth: CalibrationWindows | None = None
    evaluation: CalibrationWindows | None = None
    stream: StreamPlan | None = None
    fetch_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Estimated peak of the process's memory."""
        return self.memory.host_bytes

    @property
    def available_memory_bytes(self) -> int:
        """Memory that the process may use."""
        return self.memory.host_limit

    def require_feasible(self) -> None:
        """Raise PreflightError with every reason why the conversion cannot succeed."""
        if self.errors:
            shown = "\n".join(f"  - {e}" for e in self.errors[:20])
            rest = f"\n  … and {len(self.errors) - 20} more" if len(self.errors) > 20 else ""
            raise PreflightError(f"this conversion cannot succeed:\n{shown}{rest}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without the manifest's tensors."""
        return {
            "source": self.manifest.source,
            "model": self.manifest.model.to_dict(),
            "recipe": self.recipe.to_dict(),
            "modules": [vars(row) for row in self.rows],
            "calibration": self.manifest.calibration,
            "evaluation": None if self.evaluation is None else self.evaluation.record,
            "input_bytes": self.input_bytes,
            "fetch_bytes": self.fetch_bytes,
            "output_bytes": self.output_bytes,
            "free_bytes": self.free_bytes,
            "scratch_bytes": self.scratch_bytes,
            "memory_bytes": self.memory_bytes,
            "available_memory_bytes": self.available_memory_bytes,
            "device_memory_bytes": self.memory.device_bytes,
            "available_device_memory_bytes": self.memory.device_limit,
            "device_steps": self.memory.device_steps,
            "activation_bytes": self.memory.activation_bytes,
            "activation_place": self.memory.place,
            "stream": None if self.stream is None else self.stream.to_dict(),
            "side_files": [name for name, _ in self.side_files],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "errors": list(self.errors),
        }


def make_plan(
    source: Source,
    recipe: Recipe,
    out: Path,
    device: torch.device,
    budget: MemoryBudget | None = None,
    *,
    overwrite: bool = False,
    report: ReportOptions = _DEFAULT_REPORT,
    jobs: int = 1,
    processes: int = 1,
) -> Plan:
    """Plan a conversion, reading no weights but a quantized checkpoint's zero points.

    Raises:
        ConvertError: the calibration text, the evaluation text or the tokenizer cannot be read.
    """
    problems = source.check()
    errors = [p.message for p in problems if p.severity == "error"]
    warnings = [p.message for p in problems if p.severity != "error"]
    if uses_gptq(recipe) and recipe.gptq.solver == "auto-gptq" and (problem := auto_gptq_problem()):
        errors.append(problem)
    kept = KeptModules({}) if errors else plan_kept_codes(source, recipe)
    if recipe.int4.requantize == "never":
        errors += [f"{message}, which --no-requantize (int4.requantize never) forbids" for message in kept.requantized]
    elif recipe.int4.requantize == AUTO:
        warnings += kept.requantized
    windows = calibration_windows(source, recipe.calibration) if recipe.calibration.enabled and not errors else None
    evaluation = None
    if report.evaluate is not None and not errors:
        evaluation = evaluation_windows(source, report.evaluate, report.evaluate_windows)
    if windows is None and evaluation is None:
        warnings += tokenizer_warnings(source)
    side_files, renamed = _side_files(source)
    warnings += renamed
    manifest = build_manifest(
        source.spec,
        recipe,
        source=source.identity,
        side_files=[name for name, _ in side_files],
        calibration=None if windows is None else windows.record,
        kept=kept.modules,
    )
    rows = tuple(module_rows(manifest))
    warnings += padding_warnings(manifest, recipe)
    errors += _idle_group_sizes(manifest, recipe) + _unfoldable(manifest)
    few = windows is not None and windows.tokens < LEAST_CALIBRATION_TOKENS
    if windows is not None and few and not recipe.calibration.allow_few_tokens:
        errors.append(
            f"calibration has {windows.tokens} tokens, and needs {LEAST_CALIBRATION_TOKENS} at least, better "
            f"{RECOMMENDED_CALIBRATION_TOKENS}: raise --calibration-windows, give a longer --calibration-text, or "
            "force it with --allow-few-tokens"
        )
    elif windows is not None and windows.tokens < RECOMMENDED_CALIBRATION_TOKENS:
        warnings.append(
            f"calibration has {windows.tokens} tokens; with fewer than {RECOMMENDED_CALIBRATION_TOKENS} its statistics "
            "are noisy (raise --calibration-windows, or give a longer --calibration-text)"
        )
    output_bytes = sum(t.nbytes for t in all_tensors(manifest)) + sum(_side_bytes(*file) for file in side_files)
    place = _existing_parent(out)
    # What has yet to be fetched takes of the disk before the artifact does.
    free = max(0, shutil.disk_usage(place).free + staged_bytes(out) - source.bytes_to_come(place))
    stream = source.stream_plan(ReadingOrder(manifest))
    # Measuring would take the weights once more.
    depth = depth_windows(windows, evaluation) if report.enabled and stream is None else None
    memory = plan_memory(
        source,
        manifest,
        windows,
        device,
        budget or MemoryBudget(),
        depth=depth,
        evaluation=evaluation,
        jobs=jobs,
        processes=processes,
    )
    warnings += memory.problems()
    scratch = memory.scratch_bytes + (0 if stream is None else stream.peak_bytes)
    warnings += _stream_warnings(stream)
    if output_bytes + scratch > free:
        beside = f" and {_size(scratch)} beside it until it is whole" if scratch else ""
        errors.append(
            f"{out}: the artifact needs {_size(output_bytes)}{beside}, and {_size(free)} are free there; "
            "free some space or choose another place"
        )
    errors += _target_problems(source, out, place, overwrite)
    return Plan(
        manifest=manifest,
        recipe=recipe,
        rows=rows,
        input_bytes=source.total_bytes,
        output_bytes=output_bytes,
        free_bytes=free,
        memory=memory,
        scratch_bytes=scratch,
        side_files=tuple(side_files),
        windows=windows,
        warnings=tuple(warnings),
        errors=tuple(errors),
        notes=kept.notes + (kept.requantized if recipe.int4.requantize == "always" else ()),
        depth=depth,
        evaluation=evaluation,
        stream=stream,
        fetch_bytes=source.bytes_to_come(),
    )


def _stream_warnings(stream: StreamPlan | None) -> list[str]:
    if stream is None or len(stream.order) > 1 or not stream.order:
        return []
    return [f"{stream.order[0].name} is all there is of the weights: --stream has the whole of it on the disk at once"]


def _side_files(source: Source) -> tuple[list[SideFile], list[str]]:
    """Files to copy, and a message for each whose name the artifact needs for itself."""
    kept: list[SideFile] = []
    left: list[str] = []
    files = dict(source.side_files())
    for name, content in files.items():
        try:
            check_foreign_name(name, name)
            if name == CARD_FILE and SOURCE_CARD_FILE in files:
                raise ArtifactError(f"{name}: its place, {SOURCE_CARD_FILE}, is taken")
            if name in (LOG_FILE, REPORT_FILE, REPORT_DATA_FILE) or name.startswith(f"{PLOTS}/"):
                raise ArtifactError(f"{name}: the conversion writes a report of this name")
        except ArtifactError as error:
            left.append(f"not copied: {error}")
        else:
            kept.append((side_file_name(name), content))
    return sorted(kept, key=lambda item: item[0]), left


def _side_bytes(name: str, content: Path | bytes) -> int:
    if isinstance(content, bytes):
        return len(content)
    # It is copied at the end: what may not be read shall not be found out after hours.
    with read_errors(name), content.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _unfoldable(manifest: Manifest) -> list[str]:
    """A message where V's rotation is to go into codes that the checkpoint brought."""
    if not manifest.kv_cache.v_folded:
        return []
    packed = [
        name
        for name, stored in manifest.weights.items()
        if name.rpartition(".")[2] in FOLDED_MODULES and is_kept(stored.get("int4"))
    ]
    if not packed:
        return []
    return [
        f"kv_cache.fold_v multiplies a rotation into weights, which the checkpoint's own codes of {packed[0]} and "
        f"{len(packed) - 1} more cannot take: leave it out, or quantize them anew (--requantize)"
    ]


def _idle_group_sizes(manifest: Manifest, recipe: Recipe) -> list[str]:
    """A message for each group size that the recipe gives to nothing."""
    chosen = [name for name, stored in manifest.weights.items() if "int4" in stored and not is_kept(stored["int4"])]
    return [
        f"int4.group_size_overrides: {key} names nothing whose INT4 codes are chosen here, in "
        f"{manifest.model.num_layers} layers{' and the head' if 'head' in chosen else ''}: remove it, or correct it"
        for key in idle_overrides(recipe.int4.group_size_overrides, chosen)
    ]


def _existing_parent(out: Path) -> Path:
    """The nearest place above `out` that exists."""
    return next(p for p in out.absolute().parents if p.exists())


def _target_problems(source: Source, out: Path, place: Path, overwrite: bool) -> list[str]:
    """What stands in the way of a directory `out` under `place`, which exists."""
    if not place.is_dir():
        return [f"{out}: {place} is a file, expected a directory; choose another place"]
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        return [f"{out}: nothing can be written to {place} (no right to, or a read-only disk); choose another place"]
    try:
        check_target(out, overwrite=overwrite)
        check_outside(source.location, out)
    except ArtifactError as error:
        return [str(error)]
    return []
