"""Whether a conversion is reported on, and what is measured for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fut_convert.calibration_text import CalibrationWindows

#: Windows that the error through the depth is measured on, and the tokens of each: more change the third digit.
DEPTH_WINDOWS = 2
DEPTH_TOKENS = 512


@dataclass(frozen=True)
class ReportOptions:
    """What the caller wants of the report.

    Attributes:
        enabled: whether there is one.
        evaluate: UTF-8 text to measure accuracy on.
        evaluate_windows: use only so many windows of it, the first; None for all.
    """

    enabled: bool = True
    evaluate: Path | None = None
    evaluate_windows: int | None = None


def depth_windows(
    calibration: CalibrationWindows | None, evaluation: CalibrationWindows | None
) -> CalibrationWindows | None:
    """The few windows that the depth is measured on: of the evaluation text, else of the calibration text."""
    text = evaluation or calibration
    if text is None:
        return None
    few = text.ids[:DEPTH_WINDOWS, :DEPTH_TOKENS]
    return CalibrationWindows(few, {**text.record, "windows": few.shape[0], "window_tokens": few.shape[1]})
