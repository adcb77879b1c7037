"""The report's plots, drawn from `report.json`'s contents to PNG without any display."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fut_convert.report.wording import FORMAT_NAMES, path_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 110
_WIDTH = 7.5
_HEIGHT = 3.4
#: Layers whose depth plot needs no logarithmic axis have errors within this factor.
_LINEAR_RANGE = 20


def draw_plots(contents: dict[str, Any]) -> dict[str, bytes]:
    """File name -> PNG: `modules.png`, and `depth.png` and `accuracy.png` where there is something to show."""
    plots = {"modules.png": _png(_modules, contents)}
    if contents["depth"]["paths"]:
        plots["depth.png"] = _png(_depth, contents)
    if len(contents["accuracy"]["rows"]) > 1:
        plots["accuracy.png"] = _png(_accuracy, contents)
    return plots


def _png(draw: Callable[[Figure, dict[str, Any]], None], contents: dict[str, Any]) -> bytes:
    # Imported here: it takes half a second, and pyplot, which would look for a display, is never loaded.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI)
    # Room for the labels, fixed: letting the library measure them doubles the time.
    figure.subplots_adjust(left=0.085, right=0.985, top=0.91, bottom=0.145, wspace=0.24)
    FigureCanvasAgg(figure)
    draw(figure, contents)
    file = io.BytesIO()
    # Without the version that the library would write into the file.
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _modules(figure: Figure, contents: dict[str, Any]) -> None:
    """Error of every module by layer, one panel a format."""
    rows = [row for row in contents["modules"] if row["layer"] is not None and row["format"] != "bf16"]
    formats = list(dict.fromkeys(row["format"] for row in rows)) or ["bf16"]
    for number, weight_format in enumerate(formats):
        axes = figure.add_subplot(1, len(formats), number + 1)
        for module in ("qkv", "o", "gate_up", "down"):
            chosen = [row for row in rows if row["format"] == weight_format and row["module"] == module]
            _line(axes, [row["layer"] + 1 for row in chosen], [row["error"] for row in chosen], module)
        fallen = [row for row in rows if row["format"] == weight_format and row["fallback"] and row["error"]]
        if fallen:
            axes.plot(
                [row["layer"] + 1 for row in fallen], [100 * row["error"] for row in fallen], "kx", label="fallback"
            )
        _finish(axes, f"{FORMAT_NAMES[weight_format]} weights", "layer", "relative output error, %")


def _depth(figure: Figure, contents: dict[str, Any]) -> None:
    """Errors of the residual stream: each layer alone, and accumulated."""
    for number, (key, title) in enumerate((("per_layer", "each layer alone"), ("accumulated", "accumulated"))):
        axes = figure.add_subplot(1, 2, number + 1)
        for path in contents["depth"]["paths"]:
            values = path["errors"][key]
            _line(axes, list(range(1, len(values) + 1)), values, path_name(path))
        _finish(axes, title, "layer", "relative RMS error, %")


def _accuracy(figure: Figure, contents: dict[str, Any]) -> None:
    """Divergence of each way to run the model, with three standard errors."""
    rows = [row for row in contents["accuracy"]["rows"] if row["result"]["kl"]]
    figure.set_size_inches(_WIDTH, 1.2 + 0.35 * len(rows))
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot(1, 1, 1)
    values = [row["result"]["kl"]["mean"] or 0.0 for row in rows]
    errors = [3 * (row["result"]["kl"]["standard_error"] or 0.0) for row in rows]
    axes.barh([path_name(row) for row in rows], values, xerr=errors, color="tab:blue", ecolor="black", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("KL(checkpoint ‖ artifact), nats a token")
    axes.grid(axis="x", alpha=0.3)


def _line(axes: Axes, layers: list[int], values: list[float | None], label: str) -> None:
    shown = [float("nan") if value is None else 100 * value for value in values]
    if layers:
        axes.plot(layers, shown, marker="." if len(layers) <= 40 else "", label=label, linewidth=1.3)


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    heights = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()] or [np.empty(0)])
    positive = heights[heights > 0]
    if len(positive) and positive.max() > _LINEAR_RANGE * positive.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend(fontsize=8)
