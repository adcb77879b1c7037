"""`fut-run info`: which backends work here, what an artifact holds, and how its activation scales fare."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fut_runtime import __version__
from fut_runtime.errors import FutError

if TYPE_CHECKING:
    from rich.console import Console

    from fut_runtime.artifact.reader import Artifact

#: Tokens of a probe text that are read: enough for every site to settle.
_PROBE_TOKENS = 2048


@click.command(short_help="Show what works here, and what an artifact holds.")
@click.argument("model", metavar="[OUT]", required=False)
@click.option("--revision", metavar="REV", help="Branch, tag or commit, where OUT is a Hub id.")
@click.option(
    "--probe",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"Read up to {_PROBE_TOKENS} tokens of a text and report activation scales and saturated elements.",
)
@click.option("--memory", is_flag=True, help="Plan the memory of a card: weights, cache, and what a step needs.")
@click.option("--context", type=click.IntRange(1), metavar="N", help="With --memory: tokens of each request.")
@click.option("--batch", type=click.IntRange(1), metavar="B", help="With --memory: requests at once.  [default: 1]")
@click.option("--decode-mode", type=click.Choice(["int4", "fp8", "bf16"]), help="With --memory: weights to load.")
@click.option("--prefill-mode", type=click.Choice(["e4m3", "bf16", "decode"]), help="With --memory: how prompts go.")
@click.option("--kv-cache", type=click.Choice(["int4", "bf16"]), help="With --memory: the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(
    model: str | None,
    revision: str | None,
    probe: Path | None,
    memory: bool,
    context: int | None,
    batch: int | None,
    decode_mode: str | None,
    prefill_mode: str | None,
    kv_cache: str | None,
    as_json: bool,
) -> None:
    """Show which backends work on this machine, and what the artifact OUT holds.

    \b
    Examples:
      fut-run info
      fut-run info OUT
      fut-run info OUT --probe README.md
      fut-run info OUT --memory --context 32768 --batch 8
    """
    if model is None and (probe is not None or memory):
        raise click.UsageError(f"{'--memory' if memory else '--probe'} needs an artifact")
    plan = {
        "context_tokens": context, "requests": batch, "decode_mode": decode_mode, "prefill_mode": prefill_mode,
        "kv_cache": kv_cache,
    }  # fmt: skip
    given = {name: value for name, value in plan.items() if value is not None}
    if given and not memory:
        raise click.UsageError("--context, --batch, --decode-mode, --prefill-mode and --kv-cache belong to --memory")
    result = _machine()
    if model is not None:
        result |= _describe(model, revision, probe, given if memory else None)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        _print(result)


def _machine() -> dict[str, Any]:
    from fut_runtime.backend import available_backends

    return {
        "version": __version__,
        "python": platform.python_version(),
        "backends": [
            {"name": b.name, "available": b.available, "detail": b.detail} for b in available_backends()
        ],
    }  # fmt: skip


def _describe(model: str, revision: str | None, probe: Path | None, plan: dict[str, Any] | None) -> dict[str, Any]:
    from fut_runtime.artifact.reader import Artifact
    from fut_runtime.resolve import resolve_artifact

    path = resolve_artifact(model, revision)
    artifact = Artifact.open(path)
    result = {"artifact": _artifact_facts(artifact, path), "tokenizer": _tokenizer_facts(path)}
    if plan is not None:
        result["memory"] = _memory(artifact, plan)
    if probe is not None:
        result["activations"] = _probe(path, probe)
    return result


def _memory(artifact: Artifact, options: dict[str, Any]) -> dict[str, Any]:
    """The plan of a card's memory, as `plan_memory` makes it."""
    from dataclasses import asdict

    from fut_runtime.cuda.memory_plan import plan_memory

    plan = plan_memory(artifact, **options)
    derived = {"cache_bytes": plan.cache_bytes, "history_bytes": plan.history_bytes, "total_bytes": plan.total_bytes}
    return {**asdict(plan), **derived}


def _artifact_facts(artifact: Artifact, path: Path) -> dict[str, Any]:
    from fut_runtime.artifact.spec import MODULES

    manifest = artifact.manifest
    spec = manifest.model
    weights = {
        module: {
            name: {k: v for k in ("group_size", "gain", "method", "scale_method") if (v := getattr(weight, k))}
            for name, weight in manifest.weights[f"layers.0.{module}"].items()
        }
        for module in MODULES
    }
    for module, stored in weights.items():
        if "int4" in stored:
            # Layers may differ in it; what is shown of the rest is the first layer's.
            stored["int4"]["group_sizes"] = sorted(
                {
                    int4.group_size
                    for i in range(spec.num_layers)
                    if (int4 := manifest.weights[f"layers.{i}.{module}"].get("int4")) is not None and int4.group_size
                }
            )
    return {
        "path": str(path),
        "source": manifest.source,
        "architecture": spec.architecture,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocabulary": spec.vocab_size,
        "context_tokens": spec.max_position_embeddings,
        "rope": spec.rope.type,
        "eos_token_ids": list(spec.eos_token_ids),
        "weights": weights,
        "head": manifest.head if "head" in manifest.weights else f"{manifest.head}, the embedding",
        "kv_cache_bits": manifest.kv_cache.bits,
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        "activation_scales": _scale_facts(artifact),
        "cuda_prefill": _prefill_facts(artifact),
    }


def _prefill_facts(artifact: Artifact) -> dict[str, str]:
    """How the CUDA backend reads prompts of this artifact unless told otherwise, and why on the decode path."""
    from fut_runtime.cuda.prefill_weights import choose_prefill_mode

    choice = choose_prefill_mode(artifact.manifest, None)
    return {"mode": choice.mode, "reason": choice.reason}


def _scale_facts(artifact: Artifact) -> dict[str, Any]:
    """Range of the initial activation scales over the layers, a site at a time."""
    import torch

    from fut_runtime.artifact.layout import SITES

    manifest = artifact.manifest
    scales = torch.stack([artifact.tensor(f"layers.{i}.activation_scale") for i in range(manifest.model.num_layers)])
    sites = {
        site: {"min": column.min().item(), "median": column.median().item(), "max": column.max().item()}
        for site, column in zip(SITES, scales.T, strict=True)
    }
    return {"calibrated": manifest.activation.calibrated, "margin": manifest.activation.margin, "sites": sites}


def _tokenizer_facts(path: Path) -> dict[str, Any] | None:
    from fut_runtime.tokenizer import Tokenizer

    if not (path / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.from_directory(path)
    return {
        "tokens": tokenizer.vocab_size,
        "bos_token": tokenizer.special_tokens.get("bos_token"),
        "eos_token": tokenizer.special_tokens.get("eos_token"),
        "chat_template": tokenizer.chat_template is not None,
    }


def _probe(path: Path, text: Path) -> dict[str, Any]:
    """Prefill a text, and what the backend then says about its activations."""
    from fut_runtime.backend import ReportsActivations
    from fut_runtime.engine import Engine
    from fut_runtime.sampling import SamplingParams
    from fut_runtime.saturation import saturation_warning

    with Engine(path, backend="reference") as engine:
        if not isinstance(engine.backend, ReportsActivations):
            raise FutError("this backend does not report activation scales")
        try:
            ids = engine.encode(text.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise FutError(f"{text}: byte {error.start} is not UTF-8") from error
        ids = ids[: min(_PROBE_TOKENS, engine.backend.max_context_tokens - 1)]
        engine.generate([ids], SamplingParams(max_new_tokens=1))
        report = engine.backend.activation_report()
        return {"text": text.name, "tokens": len(ids), **report, "warning": saturation_warning(report)}


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"fut-run {result['version']}, Python {result['python']}\n")
    table = Table("backend", "works here", "with, or why not", box=None, pad_edge=False)
    for backend in result["backends"]:
        table.add_row(backend["name"], "yes" if backend["available"] else "no", backend["detail"])
    console.print(table)
    if "artifact" in result:
        _print_artifact(console, result["artifact"], result["tokenizer"])
    if "memory" in result:
        _print_memory(console, result["memory"])
    if "activations" in result:
        _print_activations(console, result["activations"])


def _print_artifact(console: Console, facts: dict[str, Any], tokenizer: dict[str, Any] | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    source = facts["source"]
    commit = source.get("commit") or source.get("revision")
    heads = f"{facts['heads']} heads over {facts['kv_heads']} KV heads of {facts['head_dim']}"
    scales = facts["activation_scales"]
    template = "none: fut-run continues plain text"
    rows = {
        "artifact": f"{facts['path']}, {facts['bytes'] / 1e6:.1f} MB",
        "source": (source.get("id") or source.get("name") or "unknown") + (f" at {commit}" if commit else ""),
        "model": f"{facts['architecture']}, {facts['layers']} layers, hidden size {facts['hidden_size']}, {heads}",
        "context": f"{facts['context_tokens']} tokens, rope {facts['rope']}",
        "vocabulary": f"{facts['vocabulary']}, ends at {', '.join(map(str, facts['eos_token_ids'])) or 'no token'}",
        "head": facts["head"],
        "KV cache": f"{facts['kv_cache_bits']} bits",
        "activations": "calibrated" if scales["calibrated"] else "not calibrated: conservative scales",
        "prompts on CUDA": _prefill_text(facts["cuda_prefill"]),
        "chat template": "yes" if tokenizer and tokenizer["chat_template"] else template,
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console.print()
    console.print(table)
    weights = Table("weights", "stored as", "E4M3 scale: min", "median", "max", box=None, pad_edge=False)
    for module, formats in facts["weights"].items():
        site = scales["sites"][module]
        listed = ", ".join(_format_text(name, details) for name, details in formats.items())
        weights.add_row(module, escape(listed), *(f"{site[k]:.3g}" for k in ("min", "median", "max")))
    console.print()
    console.print(weights)


def _prefill_text(prefill: dict[str, str]) -> str:
    return f"through the decode path: {prefill['reason']}" if prefill["mode"] == "decode" else prefill["mode"]


def _print_memory(console: Console, plan: dict[str, Any]) -> None:
    from rich.table import Table

    from fut_runtime.cuda.memory_plan import MAX_ROWS

    requests = f"{plan['requests']} request{'s' if plan['requests'] > 1 else ''} of {plan['context_tokens']} tokens"
    console.print(f"\nmemory of a card for {requests}:")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    step = plan["workspace_bytes"]
    step_note = f"of these {plan['logits_bytes'] / 1e6:,.1f} for {MAX_ROWS} rows of logits"
    if step is None:
        step, step_note = plan["logits_bytes"], "at least: the CUDA library is not built here"
    rows = {
        "weights": (plan["weights_bytes"], _weights_text(plan)),
        "cache": (
            plan["cache_bytes"],
            f"{plan['cache_bits']} bits, {plan['pages']} pages of {plan['page_bytes']} bytes",
        ),
        "RoPE tables": (plan["rope_bytes"], ""),
        "a step": (step, step_note),
        **_prompt_rows(plan),
        "together": (plan["total_bytes"], ""),
    }
    for name, (nbytes, note) in rows.items():
        table.add_row(name, f"{nbytes / 1e6:,.1f} MB", note)
    console.print(table)


def _weights_text(plan: dict[str, Any]) -> str:
    prompts = "" if plan["prefill_mode"] == "decode" else f", for prompts {plan['prefill_mode']}"
    return f"{plan['decode_mode']}{prompts}"


def _prompt_rows(plan: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Rows of what prompts take, where they do not take the decode path."""
    if plan["prefill_mode"] == "decode":
        return {}
    history = f"BF16, {plan['history_pages']} pages of {plan['history_page_bytes']} bytes"
    workspace = plan["prefill_workspace_bytes"]
    note = "the CUDA library is not built here" if workspace is None else ""
    return {"history of prompts": (plan["history_bytes"], history), "a run of prompts": (workspace or 0, note)}


def _format_text(name: str, details: dict[str, Any]) -> str:
    """One stored format of a module, such as `int4 group 128 (rtn, weighted_search, gain at run time)`."""
    notes = [details[key] for key in ("method", "scale_method") if key in details]
    if details.get("gain") == "runtime":
        notes.append("gain at run time")
    sizes = details.get("group_sizes", [details["group_size"]] if "group_size" in details else [])
    group = f" group {' and '.join(map(str, sizes))}" if sizes else ""
    return name + group + (f" ({', '.join(notes)})" if notes else "")


def _print_activations(console: Console, report: dict[str, Any]) -> None:
    from rich.table import Table

    console.print(f"\nafter {report['tokens']} tokens of {report['text']}, scale mode {report['scale_mode']}:")
    table = Table("site", "scale: largest", "saturated", "of elements", "in layers", box=None, pad_edge=False)
    for column, site in enumerate(report["sites"]):
        saturated = [layer[column] for layer in report["saturated"]]
        total = sum(layer[column] for layer in report["elements"])
        where = ", ".join(str(i) for i, count in enumerate(saturated) if count) or "none"
        largest = max(layer[column] for layer in report["scale"])
        table.add_row(site, f"{largest:.3g}", str(sum(saturated)), str(total), where)
    console.print(table)
    if report["warning"] is not None:
        console.print(f"\n{report['warning']}")
