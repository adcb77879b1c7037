"""The conversion, top to bottom: resolve, plan, calibrate and convert layer by layer, seal.

The module is not called `convert`, so that `fut_convert.convert` can be the function.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from fut_convert.conversion import Conversion, Progress
from fut_convert.errors import PASSING_ERRORS, ConvertError
from fut_convert.job_process import JobSetup
from fut_convert.lanes import LANES
from fut_convert.layer_jobs import LayerJobs
from fut_convert.memory import job_threads, peak_host_bytes
from fut_convert.memory_budget import MemoryBudget
from fut_convert.plan import LOG_FILE, Plan, make_plan
from fut_convert.read_ahead import ReadAhead
from fut_convert.reading_order import ReadingOrder
from fut_convert.recipe import Recipe, load_recipe
from fut_convert.report.measure import Measurements, finishing, measure
from fut_convert.report.options import ReportOptions
from fut_convert.report.write import write_report
from fut_convert.result import ConversionResult
from fut_convert.resume import LAYERS_DONE, conversion_inputs
from fut_convert.sources import Source, open_source
from fut_convert.steps import StepClock
from fut_convert.workers import Workers, worker_count
from fut_runtime.artifact.paths import REPORT_FILE
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.remains import clear_behind_renaming
from fut_runtime.artifact.staging import check_unlocked
from fut_runtime.artifact.writer import ArtifactWriter

DEFAULT_RECIPE = "rtn"


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
    device_memory: float | None = None,
    host_memory: float | None = None,
    report: bool = True,
    evaluate: str | Path | None = None,
    evaluate_windows: int | None = None,
    stream: bool = False,
    jobs: int = 1,
    calibration_processes: int = 1,
) -> Plan:
    """Resolve a model and plan its conversion without doing it; the arguments are those of `convert`.

    Of a model on the Hub the weights stay there: their headers are enough.
    """
    resolved = load_recipe(recipe, overrides)
    budget = _budget(device_memory, host_memory)
    options = _report_options(report, evaluate, evaluate_windows, stream)
    _check_processes(jobs, calibration_processes, device, stream)
    check_unlocked(Path(out))
    with open_source(model, revision=revision, token=token, stream=stream, fetch=False) as source:
        return make_plan(
            source,
            resolved,
            Path(out),
            _device(device),
            budget,
            overwrite=overwrite,
            report=options,
            jobs=jobs,
            processes=calibration_processes,
        )


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
    device_memory: float | None = None,
    host_memory: float | None = None,
    restart: bool = False,
    report: bool = True,
    evaluate: str | Path | None = None,
    evaluate_windows: int | None = None,
    stream: bool = False,
    jobs: int = 1,
    calibration_processes: int = 1,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    on_resume: Callable[[int, int], None] | None = None,
) -> ConversionResult:
    """Convert a checkpoint into an artifact.

    Args:
        model: Hub id, checkpoint directory, or `.gguf` file.
        out: directory to create. It appears only when the artifact is whole.
        recipe: a Recipe, the name of one that ships, or a YAML file.
        overrides: dotted recipe keys that replace the recipe's values, e.g. `{"int4.group_size": 64}`.
        revision: Hub only: branch, tag or commit; the commit it resolves to is recorded.
        token: Hub only: access token; that of the environment or of the Hub's login when None.
        device: torch device that calibrates and quantizes.
        overwrite: replace an existing artifact, once the new one is whole.
        device_memory, host_memory: GB that may be used of the CUDA device's and of the host's memory; what is free when
            None. The activations of calibration's windows are kept on the device if there is room, else in host memory,
            else in a file beside the artifact.
        restart: begin anew where an interrupted conversion left layers that are done; without it this one goes on from
            there, provided that it is the same conversion.
        report: write `report.md`, `report.json` and plots beside the artifact's sealed files.
        evaluate: UTF-8 text whose perplexity, with the checkpoint and with the artifact, goes into the report.
        evaluate_windows: score only so many windows of it, the first.
        stream: Hub only: fetch the weights shard by shard while they are converted, and let go each that is done. The
            report then has nothing to measure the artifact against.
        jobs: layers that are converted side by side, on a CPU, by processes of their own where it is more than one. It
            changes no byte.
        calibration_processes: processes that share the calibration windows, at most 8: each with a CUDA device of its
            own, from the given one on, or with a share of the CPU's cores. It changes no byte.
        progress, on_plan: callbacks.
        on_resume: called as on_resume(layers done, layers) where it goes on from an interrupted conversion.

    Raises:
        ReportError: something could not be measured for the report; the artifact is whole.
        ConvertError: the model, the recipe or the plan forbids it; ArtifactError: the artifact cannot be written.
    """
    device = _device(device)
    resolved = load_recipe(recipe, overrides)
    budget = _budget(device_memory, host_memory)
    options = _report_options(report, evaluate, evaluate_windows, stream)
    progress = progress or (lambda *_: None)
    _check_processes(jobs, calibration_processes, device, stream)
    # A model on the Hub is not fetched only to find this out.
    check_unlocked(Path(out))
    clear_behind_renaming(Path(out))

    def plan_of(source: Source) -> Plan:
        return make_plan(
            source,
            resolved,
            Path(out),
            device,
            budget,
            overwrite=overwrite,
            report=options,
            jobs=jobs,
            processes=calibration_processes,
        )

    with (
        StepClock(device) as clock,
        open_source(
            model,
            revision=revision,
            token=token,
            stream=stream,
            before_fetching=lambda source: plan_of(source).require_feasible(),
        ) as source,
    ):
        with clock("plan"):
            plan = plan_of(source)
        if on_plan is not None:
            on_plan(plan)
        plan.require_feasible()
        shard_bytes = int(resolved.max_shard_gb * 1e9)
        inputs = conversion_inputs(source, plan.manifest, device)
        with ArtifactWriter(
            Path(out), plan.manifest, max_shard_bytes=shard_bytes, overwrite=overwrite, inputs=inputs, restart=restart
        ) as writer:
            if writer.resumed is not None and on_resume is not None:
                on_resume(writer.resumed.state[LAYERS_DONE], plan.manifest.model.num_layers)
            with Workers(worker_count(device)) as workers, ReadAhead(source, device) as reader:
                conversion = Conversion(source, reader, plan, writer, workers, device, clock, progress)
                conversion.processes = calibration_processes
                try:
                    source.begin(ReadingOrder(plan.manifest), writer.input_directory, conversion.first_step)
                    with conversion, _processes(jobs, conversion, shard_bytes) as conversion.jobs:
                        conversion.run()
                except ConvertError as error:
                    if not isinstance(error, PASSING_ERRORS):
                        # Of the checkpoint, the recipe or the text: the next run would end here too, or be another one.
                        writer.forget()
                    raise
            with clock("seal"):
                for name, content in plan.side_files:
                    writer.copy_side_file(content, name)
                path = writer.seal()
            module_error, outcomes = conversion.module_error, conversion.outcomes
            beside = 0 if conversion.jobs is None else conversion.jobs.peak_bytes
            # What the layers left in memory is not needed any more, and running them again takes some.
            del conversion
            with finishing(path):
                measurements = Measurements()
                if report:
                    measurements = measure(source, plan, Artifact.open(path), device, clock, progress)
                result = ConversionResult(
                    path=path,
                    plan=plan,
                    seconds=clock.elapsed,
                    step_seconds=clock.seconds,
                    peak_memory_bytes=peak_host_bytes() + beside,
                    peak_device_bytes=clock.device_peak,
                    module_error=module_error,
                    gptq=outcomes,
                    resumed_layers=None if writer.resumed is None else writer.resumed.state[LAYERS_DONE],
                    step_peak_bytes=clock.peak_bytes,
                    step_peak_device_bytes=clock.peak_device_bytes,
                    measurements=measurements,
                    report=path / REPORT_FILE if report else None,
                )
                if report:
                    write_report(writer, result)
                log = {**result.to_dict(), "path": path.name}
                writer.write_log(LOG_FILE, json.dumps(log, indent=2) + "\n")
    return result


def _check_processes(jobs: int, calibrating: int, device: str | torch.device, stream: bool) -> None:
    if jobs < 1:
        raise ConvertError(f"jobs is {jobs}, expected 1 or more")
    if not 1 <= calibrating <= LANES:
        raise ConvertError(f"calibration_processes is {calibrating}, expected 1 to {LANES}")
    if calibrating > 1 and stream:
        raise ConvertError("--calibration-processes read the checkpoint each by itself; --stream has a part of it only")
    first = _device(device)
    if first.type == "cuda" and (first.index or 0) + calibrating > torch.cuda.device_count():
        raise ConvertError(
            f"--calibration-processes {calibrating} takes a CUDA device for each, from {first} on; PyTorch sees "
            f"{torch.cuda.device_count()}"
        )
    if jobs > 1 and _device(device).type != "cpu":
        raise ConvertError("--jobs shares the layers out over processes on a CPU; a GPU converts one after the other")
    if jobs > 1 and stream:
        raise ConvertError("--jobs reads several layers at a time, of which --stream has one: leave one of them out")


def _processes(jobs: int, conversion: Conversion, shard_bytes: int) -> AbstractContextManager[LayerJobs | None]:
    """The processes that a conversion shares its layers with."""
    if jobs == 1:
        return nullcontext()
    writer = conversion.writer
    setup = JobSetup(
        parent=os.getpid(),
        checkpoint=conversion.source.location,
        manifest=writer.manifest.to_json(),
        base=writer.path,
        max_shard_bytes=shard_bytes,
        threads=job_threads(jobs),
    )
    return LayerJobs(jobs, setup, (writer.lock,), conversion.layer_done)


def _report_options(report: bool, evaluate: str | Path | None, windows: int | None, stream: bool) -> ReportOptions:
    if stream and evaluate is not None:
        raise ConvertError(
            "--evaluate measures the artifact against the checkpoint, of which --stream keeps nothing: convert without "
            "the one or the other (fut-run eval perplexity --baseline compares them later)"
        )
    if evaluate is None and windows is None:
        return ReportOptions(report)
    if evaluate is None or not report:
        raise ConvertError("evaluate_windows needs a text to evaluate on, and evaluating needs a report to stand in")
    return ReportOptions(report, Path(evaluate), windows)


def _budget(device_memory: float | None, host_memory: float | None) -> MemoryBudget:
    """The budget of so many GB; None counts on what is free."""
    for value in (device_memory, host_memory):
        if value is not None and not 0 < value < float("inf"):
            raise ConvertError(f"a memory budget is {value!r}, expected a number of GB above 0")
    host, on_device = (None if gb is None else int(gb * 1e9) for gb in (host_memory, device_memory))
    return MemoryBudget(host, on_device)


def _device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConvertError(f"device {device!r} is unknown, expected cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConvertError(f"device {device!r} is not supported, expected cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConvertError("device cuda: PyTorch sees no CUDA device here; use --device cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConvertError(f"device {device}: PyTorch sees {torch.cuda.device_count()} CUDA devices, from cuda:0 up")
    return chosen
