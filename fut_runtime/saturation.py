"""When saturated activations are worth a word: what a backend reports, site by site, against a threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Share of a site's elements, in one layer, beyond E4M3's largest number.
SATURATION_THRESHOLD = 1e-3


def saturated_sites(report: Mapping[str, Any]) -> list[str]:
    """Sites of an `activation_report` with more than SATURATION_THRESHOLD saturated, such as `layer 3 down (0.4 %)`."""
    found = []
    for layer, (saturated, elements) in enumerate(zip(report["saturated"], report["elements"], strict=True)):
        for site, count, total in zip(report["sites"], saturated, elements, strict=True):
            if total and count / total > SATURATION_THRESHOLD:
                found.append(f"layer {layer} {site} ({100 * count / total:.2g} %)")
    return found


def saturation_warning(report: Mapping[str, Any]) -> str | None:
    """What to tell who ran the model, or None where nothing is wrong."""
    sites = saturated_sites(report)
    if not sites:
        return None
    listed = ", ".join(sites[:5]) + (f" and {len(sites) - 5} more" if len(sites) > 5 else "")
    remedy = "convert again with calibration on such texts, or choose prefill_mode bf16"
    if report["scale_mode"] == "frozen":
        remedy = "choose another scale_mode, " + remedy
    return f"E4M3 activations saturated at {listed}: answers may suffer; {remedy}"
