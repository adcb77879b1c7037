"""Options that several commands share, and what they mean to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from fut_runtime.engine import Engine
    from fut_runtime.sampling import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])

_MODEL_OPTIONS = (
    click.argument("model", metavar="OUT"),
    click.option("--revision", metavar="REV", help="Branch, tag or commit, where OUT is a Hub id."),
    click.option("--verify", is_flag=True, help="Check every file's hash before loading."),
    click.option("--backend", type=click.Choice(["auto", "cuda", "reference"]), default="auto", show_default=True),
    click.option("--device", metavar="DEVICE", help="Torch device of the reference backend, e.g. cpu or cuda:1."),
    click.option(
        "--decode-mode", type=click.Choice(["int4", "fp8", "bf16"]), help="Weights that decode uses.  [default: int4]"
    ),
    click.option(
        "--prefill-mode",
        type=click.Choice(["e4m3", "bf16", "decode"]),
        help="How prompts are read; decode: through the decode path.  [default: e4m3, or what weights there are]",
    ),
    click.option("--kv-cache", type=click.Choice(["int4", "bf16"]), help="[default: what the artifact says]"),
    click.option(
        "--scale-mode",
        type=click.Choice(["request", "delayed", "frozen"]),
        help="Where E4M3 activation scales come from: each request's last call, the engine's, or calibration.  "
        "[default: request]",
    ),
    click.option(
        "--compute",
        type=click.Choice(["exact", "fp32"]),
        help="exact rounds activations as the kernels do.  [default: exact]",
    ),
    click.option(
        "--prefill-chunk", type=click.IntRange(1), metavar="N", help="Read prompts N tokens at a time.  [default: 1024]"
    ),
)

_SAMPLING_OPTIONS = (
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy and reproducible."),
    click.option("--top-p", type=float, default=1.0, help="Keep the most probable tokens that make up this mass."),
    click.option("--top-k", type=int, default=0, metavar="N", help="Keep the N most probable tokens."),
    click.option("--min-p", type=float, default=0.0, help="Drop tokens below this fraction of the best one."),
    click.option("--repetition-penalty", type=float, default=1.0, help="Above 1: discourage tokens seen before."),
    click.option("--seed", type=int, help="Makes sampling reproducible, prompt by prompt."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end tokens (for benchmarks)."),
)
_MODEL_NAMES = (
    "model", "revision", "verify", "backend", "device", "decode_mode", "prefill_mode", "kv_cache", "scale_mode",
    "compute", "prefill_chunk",
)  # fmt: skip
_SAMPLING_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos",
)  # fmt: skip


def model_options(function: Function) -> Function:
    """The artifact and how it is loaded."""
    return _apply(_MODEL_OPTIONS, function)


def sampling_options(function: Function) -> Function:
    """How tokens are chosen."""
    return _apply(_SAMPLING_OPTIONS, function)


def open_engine(options: dict[str, Any], **more: Any) -> tuple[Engine, float]:
    """Load the engine that the model options describe; returns it with the seconds this took.

    Takes its own options out of `options`.
    """
    from fut_runtime.engine import Engine

    given = {name: options.pop(name) for name in _MODEL_NAMES}
    start = time.perf_counter()
    engine = Engine(**{name: value for name, value in {**given, **more}.items() if value is not None})
    return engine, time.perf_counter() - start


def sampling_params(options: dict[str, Any], **more: Any) -> SamplingParams:
    """Sampling parameters of the options, with a word on those that greedy decoding ignores.

    Raises:
        click.UsageError: a value is outside its range.
    """
    from fut_runtime.sampling import SamplingError, SamplingParams

    try:
        params = SamplingParams(**{name: options.pop(name) for name in _SAMPLING_NAMES}, **more)
    except SamplingError as error:
        raise click.UsageError(str(error)) from error
    ignored = params.ignored_when_greedy
    if ignored:
        names = ", ".join("--" + name.replace("_", "-") for name in ignored)
        click.echo(f"note: {names} has no effect at temperature 0 (greedy); set --temperature", err=True)
    return params


def _apply(options: tuple[Callable[[Function], Function], ...], function: Function) -> Function:
    for option in reversed(options):
        function = option(function)
    return function


def numbers(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """`1,8,32` → [1, 8, 32]: whole numbers above zero."""
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise click.BadParameter(f"{value!r} is no list of whole numbers above zero, such as 1,8,32", ctx, param)
    return numbers
