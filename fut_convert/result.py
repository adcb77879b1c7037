"""What a conversion made, and what it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fut_convert.plan import Plan
from fut_convert.report.measure import Measurements
from fut_convert.report.wording import finite


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion made and what it took.

    Attributes:
        path: the sealed artifact.
        seconds: whole time of the conversion.
        step_seconds: seconds by step: plan, read, calibrate, quantize, write, seal, gptq with its own calibration,
            report (running layers for it) and evaluate.
            Steps run at the same time: these are summed over the threads, and exceed `seconds` together.
        peak_memory_bytes: largest resident set of the process; `peak_device_bytes` the same of the CUDA device.
        module_error: `layers.{i}.{module}.{format}` -> relative error, see `relative_error`; of INT4 codes chosen by
            GPTQ, the square root of their `weighted_error`.
        gptq: `layers.{i}.{module}` -> how its codes came about, see `GptqLayers.outcomes`; empty without GPTQ.
        resumed_layers: layers that an interrupted conversion had done; None where this one began at the beginning.
            Times and memory are those of what was left.
        step_peak_bytes, step_peak_device_bytes: largest memory while each step ran, see `StepClock`.
        measurements: what was measured on the sealed artifact; empty without a report.
        report: the report's page, `report.md`; None without one.
    """

    path: Path
    plan: Plan
    seconds: float
    step_seconds: dict[str, float]
    peak_memory_bytes: int
    peak_device_bytes: int | None
    module_error: dict[str, float]
    gptq: dict[str, dict[str, Any]]
    resumed_layers: int | None = None
    step_peak_bytes: dict[str, int] = field(default_factory=dict)
    step_peak_device_bytes: dict[str, int] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=Measurements)
    report: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "path": str(self.path),
            "input_bytes": self.plan.input_bytes,
            "output_bytes": self.plan.output_bytes,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "estimated_memory_bytes": self.plan.memory.host_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "estimated_device_bytes": self.plan.memory.device_bytes,
            # The squares of weights near the largest float have no finite sum.
            "module_error": finite(self.module_error),
            "gptq": self.gptq,
            "resumed_layers": self.resumed_layers,
            "step_peak_bytes": self.step_peak_bytes,
            "step_peak_device_bytes": self.step_peak_device_bytes,
            **finite(self.measurements.to_dict()),
            "report": None if self.report is None else self.report.name,
            "notes": list(self.plan.notes),
            "warnings": list(self.plan.warnings),
        }
