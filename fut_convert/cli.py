"""`fut-convert`: the command line over `fut_convert.convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from fut_convert import __version__
from fut_convert.errors import RecipeError
from fut_convert.push import Push, push_options, take_push
from fut_runtime.command_errors import reported_errors
from fut_runtime.streams import for_terminal, prepare_streams
from fut_runtime.termination import terminable

#: Option name -> dotted recipe key that it overrides.
_RECIPE_OPTIONS = {
    "weights": "weights",
    "method": "int4.method",
    "solver": "gptq.solver",
    "scale_method": "int4.scale_method",
    "group_size": "int4.group_size",
    "gain": "int4.gain",
    "scale_dtype": "int4.scale_dtype",
    "nibble_order": "int4.nibble_order",
    "requantize": "int4.requantize",
    "head": "head",
    "calibration_text": "calibration.text",
    "calibration_field": "calibration.field",
    "calibration_windows": "calibration.windows",
    "window_tokens": "calibration.window_tokens",
    "allow_few_tokens": "calibration.allow_few_tokens",
    "margin": "activation.margin",
    "max_shard_gb": "max_shard_gb",
}

_GIGABYTES = click.FloatRange(0, min_open=True)


def _list(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    return None if value is None else [part.strip() for part in value.split(",")]


def _group_size(_: click.Context, __: click.Parameter, value: str | None) -> int | str | None:
    return int(value) if value is not None and value.isdecimal() else value


def _requantize(_: click.Context, __: click.Parameter, value: bool | None) -> str | None:
    return None if value is None else "always" if value else "never"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--recipe", default="rtn", show_default=True, metavar="NAME|FILE", help="What to convert how.")
@click.option("--revision", metavar="REV", help="Hub only: branch, tag or commit.")
@click.option("--device", default="cpu", show_default=True, metavar="DEVICE", help="cpu, cuda, or cuda:N.")
@click.option("--weights", callback=_list, metavar="LIST", help="Stored formats, e.g. e4m3,int4 or e4m3,int4,bf16.")
@click.option("--head", metavar="FORMAT", help="Output head: bf16, e4m3 or int4.")
@click.option("--group-size", callback=_group_size, metavar="N", help="INT4: weights a scale: auto, 32, 64 or 128.")
@click.option("--method", metavar="NAME", help="INT4: rtn (round to nearest) or gptq.")
@click.option("--solver", metavar="NAME", help="GPTQ: fut, or auto-gptq (that package's; an optional extra).")
@click.option("--scale-method", metavar="NAME", help="INT4: absmax_7, absmax_7.5, search or weighted_search.")
@click.option("--gain", metavar="WHERE", help="INT4: RMSNorm gain at runtime, or folded into the weights.")
@click.option("--scale-dtype", metavar="DTYPE", help="INT4: bfloat16 or float16.")
@click.option("--nibble-order", metavar="NAME", help="INT4: fragment order; docs/artifact.md lists them.")
@click.option(
    "--requantize/--no-requantize",
    default=None,
    callback=_requantize,
    help="Quantize the INT4 codes of a checkpoint anew, or refuse to; by default only those that cannot be kept.",
)
@click.option("--calibration-text", metavar="FILE|hub:ID", help="Text or JSONL file, or a data set on the Hub.")
@click.option("--calibration-field", metavar="NAME", help="The text in each JSONL object or row; by default, text.")
@click.option("--calibration-windows", type=click.IntRange(1), metavar="N", help="At most so many windows of it.")
@click.option("--window-tokens", type=click.IntRange(2), metavar="N", help="Tokens a calibration window.")
@click.option("--allow-few-tokens", is_flag=True, default=None, help="Calibrate even on fewer than 8192 tokens.")
@click.option("--no-calibration", is_flag=True, help="Skip it: conservative activation scales, unweighted search.")
@click.option("--margin", type=float, metavar="X", help="Activation scale: X times the largest value seen, over 448.")
@click.option("--max-shard-gb", type=float, metavar="GB", help="Largest file.")
@click.option("--report/--no-report", default=True, help="Report on the artifact's quality in report.md; by default.")
@click.option(
    "--evaluate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="UTF-8 text to measure checkpoint and artifact on, for the report.",
)
@click.option("--evaluate-windows", type=click.IntRange(1), metavar="N", help="Only the first N windows of it.")
@click.option("--device-memory", type=_GIGABYTES, metavar="GB", help="Device memory to use; all that is free.")
@click.option("--host-memory", type=_GIGABYTES, metavar="GB", help="Memory to use; all that is free.")
@click.option("--jobs", type=click.IntRange(1), default=1, metavar="N", help="CPU: layers converted side by side.")
@click.option("--calibration-processes", type=click.IntRange(1, 8), default=1, metavar="N",
              help="Processes that share the calibration windows, on a GPU each or on the CPU.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace an existing artifact, once the new one is whole.")
@click.option("--restart", is_flag=True, help="Begin anew, where an interrupted run left layers that are done.")
@click.option("--stream", is_flag=True, help="Hub only: fetch the weights shard by shard while they are converted.")
@push_options
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to standard output, and nothing else.")
@click.version_option(__version__, prog_name="fut-convert")
def main(
    model: str, out: Path, recipe: str, revision: str | None, device: str, no_calibration: bool, overwrite: bool,
    restart: bool, dry_run: bool, as_json: bool, report: bool, evaluate: Path | None, evaluate_windows: int | None,
    stream: bool, jobs: int, calibration_processes: int, **options: Any,
) -> None:  # fmt: skip
    """Convert MODEL into an artifact OUT that fut-run executes.

    MODEL is a Hub id (owner/name), a checkpoint directory (safetensors or pytorch_model.bin), or a .gguf file of the
    families Llama, Mistral without sliding window, Qwen2 and Qwen3, or of one that shares their architecture.

    A recipe says everything a conversion does; the options override it, and the resolved recipe is kept in the
    artifact. Nothing is written before the plan holds: --dry-run shows it. OUT appears only when it is whole.

    \b
    Examples:
      fut-convert meta-llama/Llama-3.1-8B out/ --device cuda
      fut-convert SmolLM2-135M-Instruct.Q4_1.gguf out/ --recipe demo
      fut-convert ./checkpoint out/ --recipe gptq --evaluate wiki.test.raw --evaluate-windows 16
      fut-convert ./checkpoint out/ --push-to-hub me/my-model --push-private
      fut-convert ./checkpoint out/ --dry-run
      fut-convert ./checkpoint out/ --no-calibration --scale-method absmax_7

    Exit codes: 0 done, 1 failed or refused, 2 wrong usage (an option, or the recipe), 130 interrupted, 143
    terminated.
    """
    prepare_streams()
    push = take_push(options)
    budget = {name: options.pop(name) for name in ("device_memory", "host_memory")}
    overrides: dict[str, Any] = {key: options[name] for name, key in _RECIPE_OPTIONS.items()}
    if no_calibration:
        idle = [name for name, key in _RECIPE_OPTIONS.items() if key.startswith("calibration.") and options[name]]
        if idle:
            raise click.UsageError(f"--{idle[0].replace('_', '-')} says how to calibrate, --no-calibration not to")
        overrides["calibration.enabled"] = False
    if evaluate is None and evaluate_windows is not None:
        raise click.UsageError("--evaluate-windows says how much of a text to evaluate on: give it with --evaluate")
    if evaluate is not None and not report:
        raise click.UsageError("--evaluate measures for the report, --no-report leaves it out")
    reporting = {"report": report, "evaluate": evaluate, "evaluate_windows": evaluate_windows}
    with reported_errors("interrupted; nothing was left behind"), terminable():
        try:
            _run(
                model, out, recipe, overrides, revision, device, overwrite, restart, dry_run, as_json,
                push, {**budget, **reporting, "stream": stream, "jobs": jobs,
                "calibration_processes": calibration_processes},
            )  # fmt: skip
        except RecipeError as error:
            raise click.UsageError(for_terminal(str(error))) from error


def _say_what_is_kept(out: Path, error: BaseException) -> None:
    from fut_convert.resume import kept_progress

    kept = kept_progress(out)
    if kept is None:
        return
    if isinstance(error, KeyboardInterrupt):
        error.message = f"interrupted; {kept}"  # type: ignore[attr-defined]
    else:
        click.echo(for_terminal(kept), err=True)


def _run(
    model: str, out: Path, recipe: str, overrides: dict[str, Any], revision: str | None, device: str, overwrite: bool,
    restart: bool, dry_run: bool, as_json: bool, push: Push | None, further: dict[str, Any],
) -> None:  # fmt: skip
    if push is not None:
        push.check()
    # Imported here: PyTorch takes seconds to load, and --help should not.
    from fut_convert.pipeline import convert, plan_conversion
    from fut_convert.terminal import ConversionDisplay, print_plan, print_result

    if dry_run:
        plan = plan_conversion(
            model, out, recipe=recipe, overrides=overrides, revision=revision, device=device, overwrite=overwrite,
            **further,
        )  # fmt: skip
        if as_json:
            click.echo(json.dumps(plan.to_dict()))
        else:
            print_plan(plan, out)
        plan.require_feasible()
        return
    with ConversionDisplay(quiet=as_json) as display:
        try:
            result = convert(
                model, out, recipe=recipe, overrides=overrides, revision=revision, device=device, overwrite=overwrite,
                restart=restart, progress=display.progress, on_plan=display.show_plan, on_resume=display.show_resume,
                **further,
            )  # fmt: skip
        except BaseException as error:
            if display.started:
                _say_what_is_kept(out, error)
            raise
    if not as_json:
        print_result(result)
    published = None
    if push is not None:
        from fut_runtime.hub.commands import print_published, quiet_progress

        quiet_progress(as_json)
        published = push.publish(result.path)
        if not as_json:
            print_published(published)
    if as_json:
        click.echo(json.dumps({**result.to_dict(), "hub": None if published is None else published.to_dict()}))
