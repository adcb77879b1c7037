"""When saturated activations are worth a warning, and that an engine gives it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fake_backend import FakeBackend, model_spec
from fut_runtime.engine import Engine
from fut_runtime.errors import FutError
from fut_runtime.saturation import saturation_warning


def report(saturated: list[list[int]], scale_mode: str = "request") -> dict[str, Any]:
    return {
        "scale_mode": scale_mode, "sites": ["qkv", "o"], "saturated": saturated,
        "elements": [[1000, 0]] + [[10_000, 10_000]] * (len(saturated) - 1),
    }  # fmt: skip


def test_a_site_past_the_threshold_is_named() -> None:
    assert saturation_warning(report([[1, 0], [10, 10]])) is None
    warning = saturation_warning(report([[2, 0], [10, 11]]))
    assert warning is not None and "layer 0 qkv (0.2 %), layer 1 o (0.11 %)" in warning
    assert "scale_mode" not in warning
    frozen = saturation_warning(report([[0, 0]] + [[20, 20]] * 4, "frozen"))
    assert frozen is not None and "and 3 more" in frozen and "choose another scale_mode" in frozen


class Reporting(FakeBackend):
    def activation_report(self) -> dict[str, Any]:
        return report([[500, 0]])


def test_an_engine_warns_when_it_closes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Engine.from_backend(Reporting(model_spec(40))) as engine:
        assert engine.activation_report()["saturated"] == [[500, 0]]
    assert "layer 0 qkv (50 %)" in caplog.text and engine.backend.released  # type: ignore[attr-defined]
    with Engine.from_backend(FakeBackend(model_spec(40))) as silent, pytest.raises(FutError, match="does not report"):
        silent.activation_report()
