"""Conversions with GPTQ, and the sequential calibration behind them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fut_convert import convert, plan_conversion
from fut_convert.calibration import Calibration, calibration_layer
from fut_convert.checkpoint_model import module_bias, module_gain, module_weight
from fut_convert.errors import ConvertError, PreflightError, RecipeError
from fut_convert.quantize.auto_gptq import auto_gptq_int4, auto_gptq_problem
from fut_convert.recipe import load_recipe
from fut_convert.sequential import SequentialCalibration
from fut_convert.sixteen_bit import SixteenBitProjection
from fut_convert.sources import open_source
from fut_convert.terminal import gptq_line
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import MODULES
from fut_runtime.reference import backend as reference

Make = Callable[..., Path]
CPU = torch.device("cpu")


def states(calibration: Calibration) -> Tensor:
    return torch.cat([*calibration.hidden.parts(slice(0, calibration.count))])


QUICK = {"calibration.windows": 4, "calibration.window_tokens": 128, "calibration.allow_few_tokens": True}
GPTQ = {**QUICK, "int4.method": "gptq"}


def test_only_the_int4_tensors_differ_from_rounding_to_nearest(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint())
    rtn = Artifact.open(convert(checkpoint, tmp_path / "rtn", overrides=QUICK).path)
    result = convert(checkpoint, tmp_path / "gptq", overrides=GPTQ)
    gptq = Artifact.open(result.path, verify=True)
    names = [n for n in json.loads((gptq.path / "model.safetensors.index.json").read_text())["weight_map"]]
    # Scales and maxima of the E4M3 path come from the checkpoint's own forward in both.
    different = {n for n in names if not torch.equal(rtn.tensor(n).view(torch.uint8), gptq.tensor(n).view(torch.uint8))}
    assert different and all(n.endswith((".int4", ".int4_scale")) for n in different)
    assert {n.removesuffix(".int4") for n in different if n.endswith(".int4")} == set(result.gptq)
    spec = gptq.manifest.weights["layers.1.down"]["int4"]
    assert (spec.method, spec.scale_method) == ("gptq", "weighted_search")
    assert gptq.manifest.weights["layers.1.down"]["e4m3"].method == "rtn"
    assert gptq.manifest.recipe["gptq"] == {
        "solver": "fut", "damping": 0.01, "act_order": True, "sweeps": 1, "correction": 0.5,
    }  # fmt: skip
    assert "gptq" not in rtn.manifest.recipe


def test_the_result_says_how_the_codes_came_about(tiny_checkpoint: Make, tmp_path: Path) -> None:
    result = convert(str(tiny_checkpoint()), tmp_path / "out", overrides=GPTQ)
    assert set(result.gptq) == {f"layers.{i}.{m}" for i in range(2) for m in MODULES}
    for name, outcome in result.gptq.items():
        assert outcome["damping"] == 0.01 and outcome["fallback"] is None
        assert result.module_error[f"{name}.int4"] == outcome["weighted_error"] ** 0.5 > 0
    assert "gptq" in result.step_seconds
    assert json.loads((result.path / "conversion_log.json").read_text())["gptq"] == result.gptq
    assert gptq_line(result.gptq) == "8 modules with damping 0.01"


def test_a_fallback_is_named(tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fut_convert.quantize.gptq.factorize", lambda *_: None)
    checkpoint = str(tiny_checkpoint())
    result = convert(checkpoint, tmp_path / "out", overrides=GPTQ)
    assert all("not positive definite" in outcome["fallback"] for outcome in result.gptq.values())
    assert "rounded to nearest instead: layers.0.qkv, layers.0.o" in gptq_line(result.gptq)


def test_results_are_reproducible(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint())
    first, second = (Artifact.open(convert(checkpoint, tmp_path / n, overrides=GPTQ).path) for n in ("a", "b"))
    assert first.files == second.files


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("qwen2_biases", "runtime"),
        ("qwen3_qk_norm", "folded"),
        ("intermediate_1568", "runtime"),
        ("head_dim_80", "folded"),
    ],
)
def test_logits_are_nearer_than_with_rounding_to_nearest(
    name: str, gain: str, odd_checkpoint: Make, tmp_path: Path
) -> None:
    checkpoint = str(odd_checkpoint(name))
    common = {**QUICK, "calibration.windows": 8, "int4.gain": gain}
    logits: dict[str, Tensor] = {}
    for method in ("bf16", "rtn", "uncorrected", "gptq"):
        options = {**common, "weights": ["bf16"]} if method == "bf16" else {**common, "weights": ["int4"]}
        options["int4.method"] = "gptq" if method in ("gptq", "uncorrected") else "rtn"
        options["gptq.correction"] = 0.0 if method == "uncorrected" else 0.5
        result = convert(checkpoint, tmp_path / method, overrides=options)
        mode = "bf16" if method == "bf16" else "int4"
        backend = reference.load(
            Artifact.open(result.path), decode_mode=mode, prefill_mode="decode", kv_cache="bf16", compute="fp32"
        )
        assert result.plan.windows is not None
        # Random models have nothing to generalize, so on what they were calibrated on.
        windows = result.plan.windows.ids.tolist()
        logits[method] = torch.cat([backend.prefill([(backend.open_request(128), ids)]) for ids in windows])
    lost = {m: (logits[m] - logits["bf16"]).norm().item() for m in ("rtn", "uncorrected", "gptq")}
    assert lost["uncorrected"] < 0.95 * lost["rtn"] and lost["gptq"] < 0.95 * lost["uncorrected"]


def test_a_head_in_int4_is_calibrated_behind_the_quantized_layers(tiny_checkpoint: Make, tmp_path: Path) -> None:
    result = convert(str(tiny_checkpoint(tied=False)), tmp_path / "out", overrides={**GPTQ, "head": "int4"})
    artifact = Artifact.open(result.path, verify=True)
    assert "head" in result.gptq and artifact.manifest.weights["head"]["int4"].method == "gptq"
    assert 0 < result.module_error["head.int4"] < 0.15


@pytest.mark.parametrize("name", ["base", "qwen2_biases", "qwen3_qk_norm"])
def test_calibration_behind_unquantized_modules_is_the_plain_one(name: str, odd_checkpoint: Make) -> None:
    """With every module left as it is the windows advance alike, and the Hessians' diagonals are the second moments."""
    with open_source(str(odd_checkpoint(name))) as source:
        model, embed = source.spec, source.load("model.embed_tokens.weight")
        windows = torch.randint(3, 384, (3, 40), generator=torch.Generator().manual_seed(1))
        plain, sequential = (cls(model, windows, embed, CPU) for cls in (Calibration, SequentialCalibration))
        for index in range(model.num_layers):
            weights = {m: module_weight(source.load, index, m) for m in MODULES}
            gains = {m: g for m in MODULES if (g := module_gain(source.load, index, m)) is not None}
            biases = {m: module_bias(source.load, index, m) for m in MODULES if model.module_bias(m)}
            norms = None
            if model.qk_norm:
                q, k = (source.load(f"model.layers.{index}.self_attn.{n}_norm.weight").float() for n in "qk")
                norms = (q, k)
            layer = calibration_layer(weights, gains, biases, norms, CPU)
            statistics = plain.run_layer(layer)
            hessians: dict[str, Tensor] = {}

            def keep(module: str, hessian: Tensor, _: None, layer=layer, hessians=hessians) -> SixteenBitProjection:  # type: ignore[no-untyped-def]
                hessians[module] = hessian
                return layer.projections[module]  # type: ignore[no-any-return]

            sequential.quantize_layer(gains, norms, keep)
            assert list(hessians) == list(MODULES)
            assert torch.equal(states(sequential), states(plain))
            for module, hessian in hessians.items():
                moment = statistics.second_moment[module]
                if module in gains:
                    moment = moment * gains[module].double().square()
                assert torch.allclose(hessian.diagonal().double(), moment, rtol=0.01)
                assert torch.allclose(hessian, hessian.T)
                assert torch.linalg.eigvalsh(hessian.double())[0] > -1e-5 * hessian.diagonal().mean()


def test_hessians_are_sums_of_outer_products(odd_checkpoint: Make) -> None:
    with open_source(str(odd_checkpoint("base"))) as source:
        windows = torch.randint(3, 384, (3, 40), generator=torch.Generator().manual_seed(1))
        calibration = SequentialCalibration(source.spec, windows, source.load("model.embed_tokens.weight"), CPU)
        gain = torch.rand(source.spec.hidden_size) + 0.5
        h = states(calibration).flatten(0, 1).double()
        normalized = h / (h.square().mean(dim=1, keepdim=True) + source.spec.rms_norm_eps).sqrt()
        for given, x in ((gain, normalized * gain.double()), (None, normalized)):
            expected = x.T @ x / len(x)
            assert torch.allclose(calibration.head_hessian(given).double(), expected, atol=0.004 * expected.max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration.enabled": False}, "needs what calibration sees"),
        ({"weights": ["e4m3"], "head": "int4"}, "add int4 to weights"),
        ({"gptq.damping": 1.5}, "at least 0 and at most 1"),
        ({"int4.method": "gptk"}, "did you mean gptq"),
        ({"gptq.solver": "autogptq"}, "did you mean auto-gptq"),
        ({"gptq.solver": "auto-gptq", "int4.method": "rtn"}, "choose gptq"),
        ({"gptq.solver": "auto-gptq", "int4.scale_method": "weighted_search"}, "chooses its own scales, 2·max/15"),
        ({"gptq.sweeps": -1}, "a whole number of at least 0"),
        ({"gptq.correction": 2}, "at least 0 and at most 1"),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("gptq", options)


def test_formats_without_int4_ignore_the_method() -> None:
    assert load_recipe("gptq", {"weights": ["e4m3"]}).int4.method == "gptq"


def test_inputs_that_overflow_name_the_module(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fut_convert.sequential.outer_products", lambda _, x: x.float().T @ x.float() * torch.inf)
    with pytest.raises(ConvertError, match=r"layers\.0\.qkv behind the quantized layers is not finite"):
        convert(str(tiny_checkpoint()), tmp_path / "out", overrides=GPTQ)
    assert not (tmp_path / "out").exists()


def test_the_plan_counts_the_solvers_memory(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint())
    plain, gptq = (plan_conversion(checkpoint, tmp_path / "out", overrides=o).memory_bytes for o in (QUICK, GPTQ))
    assert gptq > plain


@pytest.mark.skipif(auto_gptq_problem() is not None, reason=str(auto_gptq_problem()))
def test_an_artifact_can_carry_the_codes_of_auto_gptq(tiny_checkpoint: Make, tmp_path: Path) -> None:
    options = {**GPTQ, "gptq.solver": "auto-gptq", "int4.scale_dtype": "float16", "head": "int4"}
    checkpoint = tiny_checkpoint(tied=False)
    result = convert(str(checkpoint), tmp_path / "out", overrides=options)
    artifact = Artifact.open(result.path, verify=True)
    spec = artifact.manifest.weights["layers.0.qkv"]["int4"]
    assert (spec.method, spec.scale_method) == ("gptq", "absmax_7.5")
    assert artifact.manifest.recipe["gptq"]["solver"] == "auto-gptq" and artifact.manifest.tools["auto-gptq"] == "0.7.1"
    # The first module is calibrated behind nothing quantized, so its codes can be had from the solver at once.
    with open_source(str(checkpoint)) as source:
        windows = result.plan.windows
        assert windows is not None
        embed, gain = source.load("model.embed_tokens.weight"), module_gain(source.load, 0, "qkv")
        calibration = SequentialCalibration(source.spec, windows.ids, embed, CPU)
        weight = module_weight(source.load, 0, "qkv").float()
        hessian = calibration.head_hessian(gain)
        scales, expected = auto_gptq_int4(weight, hessian, spec.group_size or 0, scale_dtype=torch.float16)
    codes, stored = artifact.codes_and_scales("layers.0.qkv")
    assert torch.equal(codes, expected.codes) and torch.equal(stored, scales)
    assert result.gptq["layers.0.qkv"]["weighted_error"] == expected.weighted_error
    assert "head" in result.gptq


def test_the_plan_refuses_a_solver_that_is_not_installed(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fut_convert.plan.auto_gptq_problem", lambda: "install the extra auto-gptq")
    with pytest.raises(PreflightError, match="install the extra auto-gptq"):
        convert(str(tiny_checkpoint()), tmp_path / "out", overrides={**GPTQ, "gptq.solver": "auto-gptq"})
    assert not (tmp_path / "out").exists()
