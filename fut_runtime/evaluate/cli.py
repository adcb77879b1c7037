"""`fut-run eval`: accuracy of an artifact."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from fut_runtime.artifact.reader import Artifact
from fut_runtime.backend import check_device
from fut_runtime.errors import FutError
from fut_runtime.evaluate.baseline import checkpoint_runner
from fut_runtime.evaluate.perplexity import PerplexityResult, evaluate_perplexity
from fut_runtime.evaluate.runner import PROTOCOLS, ReferenceRunner
from fut_runtime.evaluate.windows import cut_windows
from fut_runtime.reference import backend as reference
from fut_runtime.reference.activation_scale import SCALE_MODES
from fut_runtime.tokenizer import Tokenizer


@click.group("eval")
def eval_group() -> None:
    """Measure an artifact's accuracy."""


@eval_group.command("perplexity")
@click.argument("artifact", metavar="OUT")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="UTF-8 text.")
@click.option(
    "--protocol",
    type=click.Choice(PROTOCOLS),
    default="decode",
    show_default=True,
    help="decode: every token through the decode path; prefill: through the prefill path; "
    "serve: the first half of each window prefilled, the rest decoded.",
)
@click.option(
    "--decode-mode",
    type=click.Choice(tuple(reference.DECODE_FORMATS)),
    default="int4",
    show_default=True,
    help="Weights of the decode path.",
)
@click.option(
    "--prefill-mode",
    type=click.Choice(reference.PREFILL_MODES),
    default="e4m3",
    show_default=True,
    help="Activations of the prefill path.",
)
@click.option("--kv-cache", type=click.Choice(("int4", "bf16")), help="Decode cache; default: what the artifact says.")
@click.option(
    "--scale-mode",
    type=click.Choice(SCALE_MODES),
    default="request",
    show_default=True,
    help="E4M3 activation scales. delayed: one state over all windows; request: one a window.",
)
@click.option(
    "--compute",
    type=click.Choice(tuple(reference.COMPUTE)),
    default="exact",
    show_default=True,
    help="exact: every rounding of docs/numerics.md; fp32: activations are not rounded to 16 bits.",
)
@click.option(
    "--window", "window_tokens", type=click.IntRange(2), default=2048, show_default=True, help="Tokens a window."
)
@click.option("--max-windows", type=click.IntRange(1), help="Score only the first N windows.")
@click.option("--baseline", metavar="MODEL", help="Source checkpoint to measure divergence from (FP32 compute).")
@click.option("--revision", metavar="REV", help="Branch, tag or commit, where OUT is a Hub id.")
@click.option("--verify", is_flag=True, help="Hash every file of the artifact first.")
@click.option("--device", default="cpu", show_default=True, help="Torch device, e.g. cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def perplexity(
    artifact: str, text: Path, protocol: str, decode_mode: str, prefill_mode: str, kv_cache: str | None,
    scale_mode: str, compute: str, window_tokens: int, max_windows: int | None, baseline: str | None,
    revision: str | None, verify: bool, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Perplexity of the artifact OUT on a text.

    The text is cut into windows that do not overlap, and every token but each window's first is scored. With
    --baseline the report adds the checkpoint's own perplexity, KL(checkpoint || artifact), how often both prefer the
    same token, and standard errors over windows.

    \b
    Examples:
      fut-run eval perplexity out/ --text wiki.test.raw
      fut-run eval perplexity out/ --text wiki.test.raw --protocol serve --baseline SmolLM2-135M-Instruct.Q4_1.gguf
    """
    from fut_runtime.engine import resolve_artifact

    check_device(device)
    opened = Artifact.open(resolve_artifact(artifact, revision), verify=verify)
    ids = _encode(opened, text)
    windows = cut_windows(ids, window_tokens, max_windows)
    limit = opened.manifest.model.max_position_embeddings
    if window_tokens > limit:
        raise FutError(f"--window {window_tokens} is longer than the model's {limit} positions")
    backend = reference.load(
        opened, device=device, decode_mode=decode_mode, prefill_mode=prefill_mode, kv_cache=kv_cache,
        scale_mode=scale_mode, compute=compute, planned_tokens=window_tokens,
    )  # fmt: skip
    runner = ReferenceRunner(backend.model, protocol, backend.new_scales, keep_scales=scale_mode == "delayed")
    base = None if baseline is None else checkpoint_runner(baseline, device)
    if base is not None and base.model.spec.vocab_size != opened.manifest.model.vocab_size:
        raise FutError(
            f"--baseline {baseline} has {base.model.spec.vocab_size} tokens in its vocabulary and {opened.path} has "
            f"{opened.manifest.model.vocab_size}: give the checkpoint that the artifact was made from"
        )
    console = Console(stderr=True, quiet=as_json or not sys.stderr.isatty())
    started = time.monotonic()
    with console.status("scoring") as status:
        result = evaluate_perplexity(
            runner, windows, baseline=base,
            progress=lambda i, ppl: status.update(f"window {i + 1} of {len(windows)}: perplexity {ppl:.3f}"),
        )  # fmt: skip
    settings: dict[str, object] = {
        "text": text.name, "protocol": protocol, "decode_mode": decode_mode, "prefill_mode": prefill_mode,
        "kv_cache": "int4" if backend.model.kv_cache.bits == 4 else "bf16", "scale_mode": scale_mode,
        "compute": compute, "seconds": round(time.monotonic() - started, 2),
    }  # fmt: skip
    if runner.quantized:
        settings["saturated_share"] = runner.saturated / runner.quantized
    if as_json:
        click.echo(json.dumps(_finite({**settings, **result.to_dict()})))
    else:
        _print(result, settings)


def _encode(artifact: Artifact, text: Path) -> list[int]:
    path = artifact.path / "tokenizer.json"
    if not path.is_file():
        raise FutError(f"{artifact.path}: no tokenizer.json, so a text cannot be scored")
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FutError(f"{text}: not UTF-8 ({error}); convert it first") from error
    return Tokenizer.from_directory(artifact.path).encode(content)


def _finite(value: object) -> object:
    """A value with null for every number that JSON does not have."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(result: PerplexityResult, settings: dict[str, object]) -> None:
    table = Table(title=f"{result.windows} windows of {result.window_tokens} tokens", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for key in ("protocol", "decode_mode", "prefill_mode", "kv_cache", "scale_mode", "compute"):
        table.add_row(key.replace("_", " "), str(settings[key]))
    table.add_row("perplexity", f"{result.perplexity:.3f}")
    table.add_row("nats a token", _pm(result.nll.mean, result.nll.standard_error))
    if result.baseline_perplexity is not None and result.nll_difference and result.kl and result.top1:
        change = result.perplexity / result.baseline_perplexity - 1
        table.add_row("checkpoint's perplexity", f"{result.baseline_perplexity:.3f} ({change:+.1%})")
        table.add_row("difference, paired", _pm(result.nll_difference.mean, result.nll_difference.standard_error))
        table.add_row("KL(checkpoint ‖ artifact)", _pm(result.kl.mean, result.kl.standard_error))
        share, error = 100 * result.top1.mean, 100 * result.top1.standard_error
        table.add_row(
            "same most likely token", f"{share:.1f} %" if math.isnan(error) else f"{share:.1f} ± {error:.1f} %"
        )
    if "saturated_share" in settings:
        table.add_row("saturated E4M3 activations", f"{settings['saturated_share']:.2e}")
    table.add_row("seconds", str(settings["seconds"]))
    Console().print(table)


def _pm(mean: float, error: float) -> str:
    return f"{mean:.4f}" if math.isnan(error) else f"{mean:.4f} ± {error:.4f}"
