"""Calibration against transformers and against the reference model, and the scales it leads to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fut_convert import calibration as module
from fut_convert.calibration import Calibration, LayerStatistics, calibration_layer, uncalibrated_scales
from fut_convert.checkpoint_model import model_from_checkpoint, module_bias, module_gain, module_weight
from fut_convert.sources import Source, open_source
from fut_runtime.artifact.layout import SITES
from fut_runtime.artifact.spec import MODULES
from fut_runtime.reference.numerics import EXACT
from tiny_artifact import MODEL

Make = Callable[..., Path]
CPU = torch.device("cpu")
WINDOWS = torch.randint(384, (5, 24), generator=torch.Generator().manual_seed(4))


def calibrated(source: Source, windows: Tensor = WINDOWS) -> tuple[list[LayerStatistics], Calibration]:
    """Statistics of every layer, and the calibration after the last."""
    model, load = source.spec, source.load
    calibration = Calibration(model, windows, load("model.embed_tokens.weight"), CPU)
    statistics = []
    for i in range(model.num_layers):
        norms = None
        if model.qk_norm:
            q_norm, k_norm = (load(f"model.layers.{i}.self_attn.{n}_norm.weight").float() for n in "qk")
            norms = (q_norm, k_norm)
        layer = calibration_layer(
            {m: module_weight(load, i, m) for m in MODULES},
            {m: gain for m in MODULES if (gain := module_gain(load, i, m)) is not None},
            {m: module_bias(load, i, m) for m in MODULES if model.module_bias(m)},
            norms,
            CPU,
        )
        statistics.append(calibration.run_layer(layer))
    return statistics, calibration


def states(calibration: Calibration) -> Tensor:
    return torch.cat([*calibration.hidden.parts(slice(0, calibration.count))])


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


class Hooked:
    """What transformers' model feeds each projection, FP32: a list of [tokens, in] by (layer, site)."""

    def __init__(self, path: Path, windows: Tensor) -> None:
        from transformers import AutoModelForCausalLM

        self.inputs: dict[tuple[int, str], list[Tensor]] = {}
        self.residuals: dict[tuple[int, str], list[Tensor]] = {}
        self.final: list[Tensor] = []
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        for i, layer in enumerate(model.model.layers):
            self._watch(layer.self_attn.o_proj, self.inputs, (i, "o"))
            self._watch(layer.mlp.down_proj, self.inputs, (i, "down"))
            for site, norm in (("qkv", layer.input_layernorm), ("gate_up", layer.post_attention_layernorm)):
                self._watch(norm, self.residuals, (i, site))
        model.model.norm.register_forward_pre_hook(lambda _, args: self.final.append(args[0][0]))
        self.eps = model.config.rms_norm_eps
        with torch.inference_mode():
            for window in windows:
                model(window[None])

    @staticmethod
    def _watch(part: torch.nn.Module, store: dict[tuple[int, str], list[Tensor]], key: tuple[int, str]) -> None:
        part.register_forward_pre_hook(lambda _, args: store.setdefault(key, []).append(args[0][0]))

    def normalized(self, h: Tensor) -> Tensor:
        return h / (h.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def second_moment(self, layer: int, site: str) -> Tensor:
        key = (layer, site)
        x = torch.cat(self.inputs[key]) if key in self.inputs else self.normalized(torch.cat(self.residuals[key]))
        return x.double().square().mean(0)

    def amax(self, layer: int, site: str) -> float:
        return torch.cat({**self.inputs, **self.residuals}[layer, site]).abs().max().item()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_statistics_equal_those_of_transformers(family: str, tiny_checkpoint: Make) -> None:
    pytest.importorskip("transformers", reason="transformers is the independent forward pass")
    path = tiny_checkpoint(family=family, hidden=256, heads=4, kv_heads=2)
    hooked = Hooked(path, WINDOWS)
    with open_source(str(path)) as source:
        statistics, calibration = calibrated(source)
    for layer, found in enumerate(statistics):
        for site in SITES:
            # Activations are rounded to 8 bits of mantissa here and not there; squares lose twice as much.
            assert relative(found.second_moment[site], hooked.second_moment(layer, site)) < 0.01, (layer, site)
            assert found.amax[site] == pytest.approx(hooked.amax(layer, site), rel=0.03), (layer, site)
    final = torch.cat(hooked.final)
    assert relative(states(calibration).flatten(0, 1), final) < 0.01
    assert relative(calibration.head_second_moment(), hooked.normalized(final).double().square().mean(0)) < 0.01


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_hidden_states_equal_the_reference_models(family: str, tiny_checkpoint: Make) -> None:
    with open_source(str(tiny_checkpoint(family=family, hidden=256, heads=4, kv_heads=2))) as source:
        _, calibration = calibrated(source)
        model = model_from_checkpoint(source, numerics=EXACT)
    expected = torch.stack([model.forward(model.new_cache(len(w)), w, "prefill") for w in WINDOWS])
    # The same roundings, but for the accumulators, which leave a BF16 product rounded.
    assert relative(states(calibration), expected) < 2**-7


def test_a_window_sees_nothing_of_the_others(tiny_checkpoint: Make) -> None:
    with open_source(str(tiny_checkpoint())) as source:
        together = states(calibrated(source)[1])
        alone = [states(calibrated(source, window[None])[1])[0] for window in WINDOWS]
    assert relative(together, torch.stack(alone)) < 2**-8


def test_windows_may_run_in_batches_of_any_size(tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_source(str(tiny_checkpoint())) as source:
        whole, calibration = calibrated(source)
        one_window = 4 * WINDOWS.shape[1] * 2 * source.spec.intermediate_size
        monkeypatch.setattr(module, "_BATCH_BYTES", {"cpu": 2 * one_window})
        assert module.windows_at_once(source.spec, WINDOWS.shape[1], CPU) == 2
        batched, other = calibrated(source)
    assert relative(states(other), states(calibration)) < 2**-8
    for a, b in zip(whole, batched, strict=True):
        for site in SITES:
            assert relative(b.second_moment[site], a.second_moment[site]) < 2**-8
            assert b.amax[site] == pytest.approx(a.amax[site], rel=0.02)


def test_the_moment_before_the_gain_does_not_know_the_gain(tiny_checkpoint: Make) -> None:
    with open_source(str(tiny_checkpoint())) as source:
        statistics, _ = calibrated(source)
    for found in statistics:
        for site in ("qkv", "gate_up"):
            # RMSNorm's output before its gain has a mean square of 1 over the channels, whatever the model.
            assert found.second_moment[site].mean().item() == pytest.approx(1, abs=0.01)


def test_scales_follow_from_maxima() -> None:
    found = LayerStatistics(amax={"qkv": 448.0, "o": 0.0, "gate_up": 44.8, "down": 4480.0})
    assert found.activation_scale(1.25).tolist() == pytest.approx([1.25, 1, 0.125, 12.5])
    assert found.activation_scale(1.0).dtype == torch.float32


@pytest.mark.parametrize("amax", [0.5, 20.0])
def test_uncalibrated_scales_leave_room_that_grows_with_depth(amax: float) -> None:
    layers = 4
    model = type(MODEL)(**{**vars(MODEL), "num_layers": layers})
    scales = uncalibrated_scales(model, amax, margin=1.25)
    assert scales.shape == (layers, len(SITES)) and scales.dtype == torch.float32
    assert scales[0, 0].item() == pytest.approx(1.25 * amax / 448)
    growth = scales[:, [0, 2]].flatten()[1:] * 448 / amax
    assert growth.tolist() == pytest.approx([2**5, 2**10, *[2**15] * 5])
    assert (scales[:, [1, 3]] * 448).tolist() == [[112, 3584]] * layers


def test_an_embedding_of_zeros_has_scales() -> None:
    assert (uncalibrated_scales(MODEL, 0.0, margin=1.0) > 0).all()
