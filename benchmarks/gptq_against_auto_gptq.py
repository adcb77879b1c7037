#!/usr/bin/env python3
"""The weighted error of our GPTQ solver and of auto-gptq's on every linear layer of a model, at equal settings.

    python benchmarks/gptq_against_auto_gptq.py MODEL --label smollm2 --calibration-text wiki.valid.tokens

`ours` is as conversions run it, `ours_unswept` without its sweeps of coordinate descent. All get the same weights, the
same Hessian (FP32, of the checkpoint's own activations), scales of absmax/7.5, damping 0.01, act-order and static
groups. Scales stay in FP32, as auto-gptq keeps them while it solves. The error is tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr(W H Wᵀ),
in FP64. One JSON line a linear layer goes to benchmarks/results/gptq-against-auto-gptq.jsonl; a summary is printed.
Needs the extra `auto-gptq`.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from fut_convert.calibration import calibration_layer  # noqa: E402
from fut_convert.calibration_text import calibration_windows  # noqa: E402
from fut_convert.checkpoint_model import module_gain, module_weight  # noqa: E402
from fut_convert.quantize.auto_gptq import solve  # noqa: E402
from fut_convert.quantize.gptq import GptqSettings, gptq_int4, row_errors  # noqa: E402
from fut_convert.quantize.rtn import rtn_int4  # noqa: E402
from fut_convert.recipe import CalibrationRecipe  # noqa: E402
from fut_convert.sequential import SequentialCalibration  # noqa: E402
from fut_convert.sixteen_bit import SixteenBitProjection  # noqa: E402
from fut_convert.sources import Source, open_source  # noqa: E402
from fut_convert.sources.names import EMBEDDING, MODULE_PROJECTIONS  # noqa: E402
from fut_runtime.artifact.spec import MODULES  # noqa: E402
from fut_runtime.bench.machine import source_commit  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "gptq-against-auto-gptq.jsonl"


def hessians(source: Source, windows: Tensor, device: torch.device) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """Layer, module, its weight and FP32 Hessian, nothing being quantized on the way."""
    calibration = SequentialCalibration(source.spec, windows, source.load(EMBEDDING), device)
    for index in range(source.spec.num_layers):
        weights = {m: module_weight(source.load, index, m) for m in MODULES}
        gains = {m: g for m in MODULES if (g := module_gain(source.load, index, m)) is not None}
        layer = calibration_layer(weights, gains, {}, None, device)
        found: dict[str, Tensor] = {}

        def keep(module: str, hessian: Tensor, _: None, layer=layer, found=found) -> SixteenBitProjection:
            found[module] = hessian
            return layer.projections[module]

        calibration.quantize_layer(gains, None, keep)
        for module, hessian in found.items():
            yield index, module, weights[module].to(device, torch.float32), hessian


def compare(weight: Tensor, hessian: Tensor, group_size: int) -> dict[str, Tensor]:
    """Error of each row, FP64 [out]: theirs, ours, rounding to nearest, and of the row itself; and the seconds."""
    settings = GptqSettings()
    begin = time.monotonic()
    decoded, steps = solve(weight, hessian, group_size, settings, settings.damping)
    middle = time.monotonic()
    scales = weight.unflatten(1, (-1, group_size)).abs().amax(dim=-1) / 7.5
    ours = gptq_int4(weight, hessian, scales, group_size, settings)
    end = time.monotonic()
    unswept = gptq_int4(weight, hessian, scales, group_size, replace(settings, sweeps=0))
    wide = hessian.double()
    lost = weight.double() - decoded.double()
    return {
        "auto_gptq": ((lost @ wide) * lost).sum(dim=1),
        "ours": row_errors(weight, ours.codes, scales, group_size, wide),
        "ours_unswept": row_errors(weight, unswept.codes, scales, group_size, wide),
        "rtn": row_errors(weight, rtn_int4(weight, scales, group_size), scales, group_size, wide),
        "total": row_errors(weight, None, scales, group_size, wide),
        "equal_scales": (steps - scales).abs().amax(dim=1) < 1e-6 * scales.amax(),
        "seconds": torch.tensor([middle - begin, end - middle]),
    }


@click.command()
@click.argument("model")
@click.option("--label", required=True)
@click.option("--calibration-text", default="builtin", show_default=True, help="File, or builtin.")
@click.option("--windows", default=8, show_default=True)
@click.option("--window-tokens", default=2048, show_default=True)
@click.option("--group-size", default=64, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(
    model: str, label: str, calibration_text: str, windows: int, window_tokens: int, group_size: int, device: str,
    out: Path,
) -> None:  # fmt: skip
    """Compare the solvers on every linear layer of MODEL."""
    torch.backends.cuda.matmul.allow_tf32 = False
    facts = {
        "model": label, "group_size": group_size, "damping": 0.01, "calibration": Path(calibration_text).name,
        "windows": windows, "window_tokens": window_tokens, "device": device, "commit": source_commit() or "unknown",
        "date": str(datetime.date.today()),
    }  # fmt: skip
    lines: list[dict[str, Any]] = []
    with open_source(model) as source, torch.inference_mode(), out.open("a", encoding="utf-8") as file:
        ids = calibration_windows(
            source, CalibrationRecipe(text=calibration_text, windows=windows, window_tokens=window_tokens)
        ).ids
        for layer, module, weight, hessian in hessians(source, ids, torch.device(device)):
            rows = compare(weight, hessian, group_size)
            seconds = dict(zip(("auto_gptq_s", "ours_s"), rows.pop("seconds").tolist(), strict=True))
            first = 0
            for name in MODULE_PROJECTIONS[module]:
                count = source.tensors[f"model.layers.{layer}.{name}.weight"].shape[0]
                line = _line(f"layers.{layer}.{name}", {k: v[first : first + count] for k, v in rows.items()})
                first += count
                lines.append(line)
                file.write(json.dumps({**line, **facts}) + "\n")
            print(f"layers.{layer}.{module}: {seconds}, {_worst(lines):.6f} at worst so far", flush=True)
    _summary(lines)


def _line(name: str, rows: dict[str, Tensor]) -> dict[str, Any]:
    total = rows["total"].sum()
    errors = {key: float(rows[key].sum() / total) for key in ("ours", "ours_unswept", "auto_gptq", "rtn")}
    return {
        "linear": name, **errors, "ratio": errors["ours"] / errors["auto_gptq"],
        "ratio_unswept": errors["ours_unswept"] / errors["auto_gptq"],
        "rows_where_theirs_is_better": int((rows["auto_gptq"] < rows["ours"] * (1 - 1e-6)).sum()),
        "rows": len(rows["ours"]), "equal_scales": bool(rows["equal_scales"].all()),
    }  # fmt: skip


def _worst(lines: list[dict[str, Any]]) -> float:
    return max(float(line["ratio"]) for line in lines)


def _summary(lines: list[dict[str, Any]]) -> None:
    worse = [line for line in lines if line["ratio"] > 1]
    print(f"{len(lines)} linear layers, scales equal in {sum(line['equal_scales'] for line in lines)}")
    for key in ("ratio", "ratio_unswept"):
        ratios = torch.tensor([line[key] for line in lines], dtype=torch.float64)
        print(f"{key}: mean {ratios.mean():.5f}, least {ratios.min():.5f}, greatest {ratios.max():.6f}")
    print(f"ours is worse in {len(worse)}: {[(line['linear'], round(line['ratio'], 6)) for line in worse][:20]}")


if __name__ == "__main__":
    main()
