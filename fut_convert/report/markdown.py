"""`report.md`: the report as a page that may be pasted into a model card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fut_convert.report.wording import FORMAT_NAMES, PLOTS, path_name, percent, size, text_name
from fut_runtime.artifact.json_text import shown
from fut_runtime.markdown_table import accuracy_lines, table

_MODULES = ("qkv", "o", "gate_up", "down")


def report_page(contents: dict[str, Any], plots: Iterable[str]) -> str:
    """The page of `report_contents`; `plots` are the names of those that were drawn."""
    drawn = set(plots)
    sections = [_head(contents), _accuracy(contents, drawn), _depth(contents, drawn), _modules(contents, drawn)]
    sections += [_layers(contents), _steps(contents)]
    return "\n".join(line for section in sections for line in (*section, ""))


def _head(contents: dict[str, Any]) -> Iterator[str]:
    source, recipe, model = contents["source"], contents["recipe"], contents["model"]
    calibration, cache = contents["calibration"], contents["kv_cache"]
    yield f"# Quality of the conversion of {_identity(source)}"
    yield ""
    rotated = "rotated, V by its weights" if cache["v_folded"] else "rotated"
    detail = [w for w, on in ((rotated, cache["rotation"]), ("with zero points", cache["zero_point"])) if on]
    millions = f"{model['weights'] / 1e6:,.{1 if model['weights'] < 1e8 else 0}f}"
    yield from table(
        ("", ""),
        [
            ("model", f"{model['architecture']}, {model['num_layers']} layers, {millions} million weights"),
            ("recipe", recipe["name"]),
            ("weights", "; ".join(_stored_formats(contents["modules"]))),
            ("head", FORMAT_NAMES[contents["head"]]),
            ("KV cache", "INT4" + (f", {' and '.join(detail)}" if detail else "") if cache["bits"] == 4 else "BF16"),
            ("calibration", "none" if calibration is None else text_name(calibration)),
            ("size", f"{size(contents['input_bytes'])} → {size(contents['output_bytes'])}"),
        ],
        align="ll",
    )  # fmt: skip
    for note in contents["notes"]:
        yield ""
        yield f"{note}."


def _stored_formats(modules: Sequence[dict[str, Any]]) -> list[str]:
    """How the layers' matrices are stored: format, method and groups, each combination once."""
    stored = []
    for row in modules:
        if row["layer"] is not None:
            how = FORMAT_NAMES[row["format"]] + (f" by {row['method']}" if row["method"] else "")
            stored.append(how + (f" in groups of {row['group_size']}" if row["group_size"] else ""))
    return list(dict.fromkeys(stored))


def _accuracy(contents: dict[str, Any], drawn: set[str]) -> Iterator[str]:
    yield "## Accuracy on a text"
    yield ""
    measured = contents["accuracy"]
    if not measured["rows"]:
        yield "Not measured. `fut-convert … --evaluate FILE` scores a text with the checkpoint and the artifact."
        return
    yield from accuracy_lines(measured)
    yield from _plot("accuracy.png", "KL divergence by protocol", drawn)


def _depth(contents: dict[str, Any], drawn: set[str]) -> Iterator[str]:
    yield "## Through the depth"
    yield ""
    measured = contents["depth"]
    layers = contents["model"]["num_layers"]
    if not measured["paths"]:
        yield (
            "Not measured: the conversion had neither a calibration text nor one to evaluate on, or it was streamed "
            "and kept nothing of the checkpoint to measure against."
        )
        return
    yield (
        "Relative RMS error of the residual stream against the checkpoint in BF16, each token measured by its own "
        f'size, on {text_name(measured["text"])}. "One layer" gives each layer the checkpoint\'s own input; '
        '"accumulated" is what all layers up to there have added up to. In '
        "brackets the quotient of sums over all tokens, which follows the few tokens that are far larger than the rest."
    )
    yield ""
    rows = []
    for path in measured["paths"]:
        errors = path["errors"]
        alone = errors["per_layer"]
        known = [value for value in alone if value is not None]
        worst = max(range(layers), key=lambda i: -1 if alone[i] is None else alone[i])
        rows.append(
            (
                path_name(path),
                percent(sum(known) / len(known) if known else None),
                f"{percent(alone[worst])} (layer {worst + 1})",
                *(
                    f"{percent(errors['accumulated'][layer])} ({percent(errors['plain_accumulated'][layer])})"
                    for layer in ((layers + 1) // 2 - 1, layers - 1)
                ),
            )
        )
    header = (
        "path", "one layer, mean", "one layer, largest", f"accumulated, layer {(layers + 1) // 2}",
        f"accumulated, layer {layers}",
    )  # fmt: skip
    yield from table(header, rows, align="lrrrr")
    yield from _plot("depth.png", "Error of the residual stream by layer", drawn)


def _modules(contents: dict[str, Any], drawn: set[str]) -> Iterator[str]:
    yield "## Module by module"
    yield ""
    yield _weighting(contents["modules"])
    yield ""
    rows = [
        (
            row["module"], FORMAT_NAMES[row["format"]], percent(row["mean_error"]), percent(row["largest_error"]),
            row["worst"],
        )
        for row in contents["module_summary"]
        if row["format"] != "bf16" or row["largest_error"]
    ]  # fmt: skip
    yield from table(("module", "format", "mean error", "largest error", "in"), rows, align="llrrl")
    yield from _gptq(contents)
    yield from _plot("modules.png", "Error of every module by layer", drawn)


def _weighting(modules: Sequence[dict[str, Any]]) -> str:
    kinds = {row["weighting"] for row in modules if row["format"] != "bf16"}
    sentences = {
        "hessian": "The error of a matrix that GPTQ solved is that of the module's output on the calibration text, "
        "√(tr(ΔHΔᵀ) / tr(WHWᵀ)) with Δ = W − Ŵ, H the mean of xxᵀ of what enters behind the quantized layers, and W "
        "the matrix that makes good for their error, where GPTQ corrects for it.",
        "second_moment": "The error of a matrix that was rounded to nearest is √(Σ E[x²](w − ŵ)² / Σ E[x²]w²) with "
        "calibration's E[x²]: that of the module's output as far as its input channels are uncorrelated.",
        "none": "Nothing was calibrated: the error is the plain relative error √(Σ(w − ŵ)² / Σw²) of the weights.",
    }
    return (
        " ".join(text for kind, text in sentences.items() if kind in kinds) or "All weights are as in the checkpoint."
    )


def _gptq(contents: dict[str, Any]) -> Iterator[str]:
    solved = [row for row in contents["modules"] if row["weighting"] == "hessian"]
    if not solved:
        return
    asked = contents["recipe"]["gptq"]["damping"]
    raised = [row for row in solved if row["damping"] is not None and row["damping"] > asked]
    kept = sum(row["damping"] is not None for row in solved) - len(raised)
    nearest = sum(row["nearest_rows"] or 0 for row in solved if not row["fallback"])
    solver = contents["recipe"]["gptq"].get("solver", "fut")
    name = "GPTQ" if solver == "fut" else f"GPTQ, by the solver of {solver},"
    yield ""
    yield f"{name} solved {kept} of {len(solved)} modules with damping {asked:g}."
    for row in raised:
        yield f"- damping raised to {row['damping']:g} for `{row['name']}`"
    for name, reason in contents["fallbacks"].items():
        yield f"- **`{name}` was rounded to nearest instead**: {reason}"
    if not raised and not contents["fallbacks"]:
        yield "No damping was raised and no module fell back to rounding to nearest."
    if nearest:
        yield ""
        yield f"In {nearest} rows of its modules rounding to nearest was the better solution and was kept."


def _layers(contents: dict[str, Any]) -> Iterator[str]:
    """The long table, folded away."""
    format_ = next((f for f in ("int4", "e4m3", "bf16") if any(r["format"] == f for r in contents["modules"])), "bf16")
    errors = {row["name"]: row["error"] for row in contents["modules"] if row["format"] == format_}
    paths = contents["depth"]["paths"]
    header = ["layer", *(f"{m} {FORMAT_NAMES[format_]}" for m in _MODULES)]
    for path in paths:
        header += [f"{path['protocol']}, alone", f"{path['protocol']}, accumulated"]
    rows = []
    for layer in range(contents["model"]["num_layers"]):
        row = [str(layer + 1), *(percent(errors[f"layers.{layer}.{m}"]) for m in _MODULES)]
        for path in paths:
            row += [percent(path["errors"][key][layer]) for key in ("per_layer", "accumulated")]
        rows.append(row)
    yield "<details><summary>Every layer</summary>"
    yield ""
    yield from table(header, rows, align="r" * len(header))
    yield ""
    yield "</details>"


def _steps(contents: dict[str, Any]) -> Iterator[str]:
    yield "## Time and memory"
    yield ""
    device = any(step["peak_device_bytes"] for step in contents["steps"])
    header = ["step", "seconds", "peak memory", *(["peak device memory"] if device else [])]
    rows = [
        [step["step"], f"{step['seconds']:.1f}", size(step["peak_memory_bytes"])]
        + ([size(step["peak_device_bytes"])] if device else [])
        for step in contents["steps"]
    ]
    total = ["whole", f"{contents['seconds']:.1f}", size(contents["peak_memory_bytes"])]
    yield from table(header, [*rows, total + ([size(contents["peak_device_bytes"])] if device else [])], "lrrr")
    yield ""
    yield (
        "Seconds are summed over threads, and steps run side by side; memory is the whole process's while a step ran. "
        f"The plan had estimated {size(contents['estimated_memory_bytes'])}."
    )
    if contents["warnings"]:
        yield ""
        yield "Warnings:"
        yield ""
        yield from (f"- {warning}" for warning in contents["warnings"])


def _identity(source: dict[str, Any]) -> str:
    name = str(source.get("id") or source.get("name") or source.get("kind"))
    return shown(name) + (f" at {source['commit'][:12]}" if source.get("commit") else "")


def _plot(name: str, title: str, drawn: set[str]) -> Iterator[str]:
    if name in drawn:
        yield ""
        yield f"![{title}]({PLOTS}/{name})"
