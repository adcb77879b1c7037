"""Writes the report beside the sealed files."""

from __future__ import annotations

import json
from pathlib import Path

from fut_convert.report.contents import report_contents
from fut_convert.report.markdown import report_page
from fut_convert.report.plots import draw_plots
from fut_convert.report.wording import PLOTS
from fut_convert.result import ConversionResult
from fut_runtime.artifact.paths import REPORT_DATA_FILE, REPORT_FILE
from fut_runtime.artifact.seal import read_marker
from fut_runtime.artifact.writer import ArtifactWriter


def write_report(writer: ArtifactWriter, result: ConversionResult) -> Path:
    """Write `report.json`, the plots and `report.md` of a sealed artifact; returns the page's path.

    They hold times and memory, which differ from run to run, and so are no part of the sealed set.

    Raises:
        ArtifactError: the disk refuses.
    """
    contents = report_contents(result, read_marker(result.path))
    plots = draw_plots(contents)
    writer.write_log(REPORT_DATA_FILE, json.dumps(contents, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    for name, png in plots.items():
        writer.write_log(f"{PLOTS}/{name}", png)
    writer.write_log(REPORT_FILE, report_page(contents, plots))
    return result.path / REPORT_FILE
