"""A roofline plot: what the card could do at each number of operations a byte, and what was measured."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

#: Dense tensor core peaks of an H100 or H200 (NVIDIA's data sheet), 10¹² operations a second.
PEAK_TERAFLOPS: dict[str, float] = {"FP8": 1979.0, "BF16": 989.5}
_DPI = 110

#: Operations a byte, 10¹² operations a second, and a label.
Point = tuple[float, float, str]


def draw_roofline(points: Mapping[str, Sequence[Point]], read_bytes_per_s: float, title: str) -> bytes:
    """A PNG of points by contender under the ceilings of memory, measured, and of the tensor cores."""
    # Imported here: it takes half a second, and pyplot, which would look for a display, is never loaded.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    most = max(x for found in points.values() for x, _, _ in found)
    ends = (min(10.0, most / 2), 2 * most)
    for name, peak in PEAK_TERAFLOPS.items():
        ridge = peak * 1e12 / read_bytes_per_s
        roof = [ends[0], ridge, ends[1]] if ends[0] < ridge < ends[1] else list(ends)
        heights = [min(peak, x * read_bytes_per_s / 1e12) for x in roof]
        axes.plot(roof, heights, color="0.6", linewidth=1)
        axes.annotate(f"{name}, {peak:.0f}", (ends[1], heights[-1]), ha="right", va="bottom", fontsize=8)
    for number, (name, found) in enumerate(points.items()):
        xs, ys = [x for x, _, _ in found], [y for _, y, _ in found]
        axes.plot(xs, ys, marker="osD^"[number % 4], linestyle="", label=name)
        for x, y, label in found:
            axes.annotate(label, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("10¹² operations a second")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
