"""The plan's prediction of device memory against the tensors that really live at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from fut_convert import calibration as calibration_module
from fut_convert import sixteen_bit
from fut_convert.calibration import Calibration, calibration_layer
from fut_convert.device_memory import _LIBRARY_BYTES, device_memory
from fut_convert.gptq_layers import GptqLayers
from fut_convert.manifest import build_manifest
from fut_convert.original_layer import OriginalLayer
from fut_convert.quantize import gptq as gptq_module_
from fut_convert.recipe import load_recipe
from fut_runtime.artifact.spec import MODULES, ModelSpec
from tensor_memory import TensorMemory
from tiny_artifact import MODEL

CPU = torch.device("cpu")


def shaped(hidden: int, heads: int, kv_heads: int, intermediate: int) -> ModelSpec:
    return replace(
        MODEL, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=64, num_layers=1, vocab_size=300,
        intermediate_size=intermediate, qk_norm=False, qkv_bias=False,
    )  # fmt: skip


def predicted(model: ModelSpec, windows: tuple[int, int], **options: object) -> Mapping[str, int]:
    recipe = load_recipe("gptq", {"int4.gain": "folded", **options})
    manifest = build_manifest(model, recipe, source={"kind": "directory", "name": "x"}, calibration={"text": "x"})
    memory = device_memory(manifest, windows, CPU)
    states = 2 * windows[0] * windows[1] * model.hidden_size
    if recipe.int4.method == "gptq":
        assert (memory.resident, memory.middle) == (2 * states, states if recipe.gptq.correction else 0)
        assert memory.added == memory.middle
    return {step: size - _LIBRARY_BYTES for step, size in memory.steps.items()}


@pytest.fixture
def everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, batches and chunks as on a GPU: in BF16, and larger than these small models."""
    monkeypatch.setattr(sixteen_bit, "multiplies_bfloat16", lambda _: True)
    monkeypatch.setattr(calibration_module, "_BATCH_BYTES", {"cpu": 1 << 40})
    monkeypatch.setattr(gptq_module_, "_ERROR_CHUNK", {"cpu": 1 << 17})


@pytest.mark.parametrize("shape", [(256, 4, 2, 896), (512, 8, 2, 1792)])
@pytest.mark.parametrize("windows", [(2, 256), (4, 512)])
def test_a_layer_takes_what_was_predicted(
    shape: tuple[int, int, int, int], windows: tuple[int, int], everything_at_once: None
) -> None:
    model = shaped(*shape)
    ids = torch.randint(0, 300, windows)
    embed = torch.randn(300, model.hidden_size).bfloat16()
    weights = {m: (torch.randn(model.module_shape(m)) * 0.02).bfloat16() for m in MODULES}
    calibration = Calibration(model, ids, embed, CPU)
    with TensorMemory() as memory:
        # A copy, as `to(device)` makes one of what lies in host memory.
        calibration.run_layer(calibration_layer({m: w.clone() for m, w in weights.items()}, {}, {}, None, CPU))
    # The hidden states are on the device already; what is predicted has a batch of them on top.
    found = memory.peak + 2 * ids.numel() * model.hidden_size
    assert found == pytest.approx(predicted(model, windows, **{"int4.method": "rtn"})["calibrate"], rel=0.1)


@pytest.mark.parametrize("correction", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(256, 4, 2, 1536), (192, 3, 1, 1280)])
def test_gptq_takes_what_was_predicted(
    shape: tuple[int, int, int, int], correction: float, everything_at_once: None
) -> None:
    """The factors of `down`'s wide Hessian are what counts in large models."""
    model, windows = shaped(*shape), (1, 128)
    options = {"gptq.correction": correction}
    recipe = load_recipe("gptq", {"int4.gain": "folded", **options})
    manifest = build_manifest(model, recipe, source={"kind": "directory", "name": "x"}, calibration={"text": "x"})
    ids = torch.randint(0, 300, windows)
    embed = torch.randn(300, model.hidden_size).bfloat16()
    weights = {m: (torch.randn(model.module_shape(m)) * 0.02).bfloat16() for m in MODULES}
    gains = {m: torch.ones(model.hidden_size) for m in ("qkv", "gate_up")}
    layers = GptqLayers(manifest, recipe.gptq, ids, embed, CPU)
    own = Calibration(model, ids, embed, CPU)
    with TensorMemory() as memory:
        layer = calibration_layer({m: w.clone() for m, w in weights.items()}, gains, {}, None, CPU)
        layers.layer(0, weights, gains, {}, None, OriginalLayer(own, layer) if correction else None)
    steps = predicted(model, windows, **options)
    assert max(steps, key=lambda step: steps[step]) == "gptq down"
    assert memory.peak == pytest.approx(steps["gptq down"], rel=0.1)
