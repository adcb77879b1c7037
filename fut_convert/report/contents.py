"""`report.json`: everything the report says, as plain data; the page and the plots are made from it."""

from __future__ import annotations

import math
from typing import Any

from fut_convert.report.wording import finite
from fut_convert.result import ConversionResult
from fut_runtime.artifact.manifest import Manifest

REPORT_VERSION = 1


def report_contents(result: ConversionResult, files_sha256: str) -> dict[str, Any]:
    """The report of a conversion.

    Args:
        result: the conversion, with its measurements.
        files_sha256: SHA-256 of the artifact's `fut_files.json`: it says which artifact the report is about.
    """
    plan, manifest = result.plan, result.plan.manifest
    modules = module_rows(result)
    contents = {
        "report_version": REPORT_VERSION,
        "files_sha256": files_sha256,
        "source": manifest.source,
        "model": {**manifest.model.to_dict(), "weights": _weights(manifest)},
        "recipe": manifest.recipe,
        "tools": manifest.tools,
        "head": manifest.head,
        "kv_cache": {
            "bits": manifest.kv_cache.bits,
            "rotation": manifest.kv_cache.rotation,
            "v_folded": manifest.kv_cache.v_folded,
            "zero_point": manifest.kv_cache.zero_point,
        },
        "calibration": manifest.calibration,
        "input_bytes": plan.input_bytes,
        "output_bytes": plan.output_bytes,
        "modules": modules,
        "module_summary": module_summary(modules),
        "fallbacks": {row["name"]: row["fallback"] for row in modules if row["fallback"]},
        **result.measurements.to_dict(),
        "seconds": result.seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
        "estimated_memory_bytes": plan.memory_bytes,
        "peak_device_bytes": result.peak_device_bytes,
        "steps": [
            {
                "step": step,
                "seconds": seconds,
                "peak_memory_bytes": result.step_peak_bytes.get(step),
                "peak_device_bytes": result.step_peak_device_bytes.get(step),
            }
            for step, seconds in sorted(result.step_seconds.items(), key=lambda item: -item[1])
        ],
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }
    checked: dict[str, Any] = finite(contents)
    return checked


def module_rows(result: ConversionResult) -> list[dict[str, Any]]:
    """One row a matrix and format, in the artifact's order.

    `error` is the relative error of the matrix's output and `weighting` how its weights' errors were weighed for it:
    `hessian` (exact on the calibration text), `second_moment` (the diagonal of that), or `none`.
    """
    calibrated = result.plan.manifest.calibration is not None
    rows = []
    for name, formats in result.plan.manifest.weights.items():
        for weight_format, spec in formats.items():
            outcome = result.gptq.get(name, {}) if spec.method == "gptq" else {}
            rows.append(
                {
                    "name": name,
                    "module": name.rpartition(".")[2],
                    "layer": None if name == "head" else int(name.split(".")[1]),
                    "format": weight_format,
                    "method": spec.method,
                    "scale_method": spec.scale_method,
                    "group_size": spec.group_size,
                    "error": result.module_error[f"{name}.{weight_format}"],
                    "weighting": "hessian" if outcome else "second_moment" if calibrated else "none",
                    "damping": outcome.get("damping"),
                    "fallback": outcome.get("fallback"),
                    "nearest_rows": outcome.get("nearest_rows"),
                }
            )
    return rows


def module_summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and largest error of each kind of module in each format."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["module"], row["format"]), []).append(row)
    summary = []
    for (module, weight_format), members in kinds.items():
        worst = max(members, key=lambda row: row["error"])
        mean = sum(row["error"] for row in members) / len(members)
        summary.append(
            {
                "module": module,
                "format": weight_format,
                "count": len(members),
                "mean_error": mean,
                "largest_error": worst["error"],
                "worst": worst["name"],
            }
        )
    return summary


def _weights(manifest: Manifest) -> int:
    """Weights of the model, each counted once: projections, embedding, and a head of its own."""
    model = manifest.model
    projections = sum(
        math.prod(next(iter(formats.values())).shape) for name, formats in manifest.weights.items() if name != "head"
    )
    matrices = 1 if model.tie_word_embeddings else 2
    return projections + matrices * model.vocab_size * model.hidden_size
