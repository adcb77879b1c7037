"""The rotation of V in W_v and W_o: the same model, whatever the cache; and from the recipe to both backends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fut_convert import convert, plan_conversion
from fut_convert.checkpoint_model import model_from_checkpoint, rows_of
from fut_convert.errors import PreflightError, RecipeError
from fut_convert.fold_values import fold_bias, fold_rows, fold_weight
from fut_convert.manifest import build_manifest
from fut_convert.recipe import load_recipe
from fut_convert.sources import open_source
from fut_runtime.artifact.manifest import KVCacheSpec, Manifest
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import ModelSpec
from fut_runtime.cuda.memory_plan import choose_cache
from fut_runtime.errors import ArtifactError, UnsupportedError
from fut_runtime.reference import backend as reference
from fut_runtime.reference.model import ReferenceModel
from fut_runtime.reference.numerics import Numerics
from quantized_checkpoints import gptq_config, gptq_parts, matrices_of, write_quantized
from tiny_artifact import MODEL

Make = Callable[..., Path]
KEY = "kv_cache.fold_v"
QUICK = {"calibration.windows": 2, "calibration.window_tokens": 128, "calibration.allow_few_tokens": True}
DOUBLE = Numerics(dtype=torch.float64, round_activations=False)
ROTATED = KVCacheSpec(bits=4, rotation=True, zero_point=True)


def folding(model: ModelSpec, fold: bool = True) -> Manifest:
    recipe = load_recipe("rtn", {KEY: fold})
    return build_manifest(model, recipe, source={"kind": "directory", "name": "x"}, calibration={"text": "x"})


def folded(model: ReferenceModel, cache: KVCacheSpec) -> ReferenceModel:
    """The same with V's rotation in the weights."""
    manifest = folding(model.spec)
    layers = []
    for layer in model.decode:
        changed = {
            m: replace(
                p,
                weight=fold_weight(p.matrix(), manifest, m),
                bias=None if p.bias is None else fold_bias(p.bias, manifest, m),
            )
            for m, p in layer.projections.items()
        }
        layers.append(replace(layer, projections=changed))
    return replace(model, prefill=layers, decode=layers, kv_cache=cache)


@pytest.mark.parametrize("name", ["base", "qwen2_biases", "qwen3_qk_norm", "head_dim_80", "head_dim_96"])
@pytest.mark.parametrize("bits", [16, 4])
def test_it_is_the_same_model(name: str, bits: int, odd_checkpoint: Make) -> None:
    """GQA, biases of v and o, q/k norms, and heads of several Hadamard blocks; decoded over either cache."""
    cache = ROTATED if bits == 4 else KVCacheSpec(bits=16, rotation=False, zero_point=False)
    with open_source(str(odd_checkpoint(name))) as source:
        plain = replace(model_from_checkpoint(source, numerics=DOUBLE), kv_cache=cache)
    turned = folded(plain, replace(cache, v_folded=True) if bits == 4 else cache)
    tokens = torch.randint(3, 384, (40,), generator=torch.Generator().manual_seed(1))
    states, caches = [], []
    for model in (plain, turned):
        kept = model.new_cache(60)
        prompt = model.forward(kept, tokens[:25], "prefill")
        answer = model.forward(kept, tokens[25:], "decode")
        # A next turn attends over history that is rebuilt from the cache.
        states.append(torch.cat([prompt, answer, model.forward(kept, tokens[:10], "prefill")]))
        caches.append(kept)
    # The rotated weights are FP32, all else FP64; over codes a tie may fall the other way.
    assert (states[1] - states[0]).norm() < (1e-6 if bits == 16 else 1e-3) * states[0].norm()
    if bits == 4:
        for layer in range(plain.spec.num_layers):
            for ours, theirs in zip(caches[1].codes(layer), caches[0].codes(layer), strict=True):
                assert (ours.codes != theirs.codes).double().mean() < 0.001
        wrong = replace(turned, kv_cache=ROTATED)
        assert wrong.kv_cache.rotates_v
        kept = wrong.new_cache(60)
        wrong.forward(kept, tokens[:25], "prefill")
        wrong.forward(kept, tokens[25:], "decode")
        # Rotated once more V is what it was, a valid model with another cache: the flag decides what is stored.
        assert (kept.codes(0)[1].codes != caches[0].codes(0)[1].codes[: kept.length]).double().mean() > 0.5


@given(st.sampled_from(["qkv", "o", "gate_up"]), st.data())
def test_rows_are_those_of_the_whole(module: str, data: st.DataObject) -> None:
    model = replace(MODEL, num_heads=3, num_kv_heads=1, head_dim=24)
    manifest = folding(model)
    weight = torch.randn(model.module_shape(module), generator=torch.Generator().manual_seed(0)).bfloat16()
    start = data.draw(st.integers(0, len(weight) - 1))
    stop = data.draw(st.integers(start + 1, len(weight)))
    whole = fold_weight(weight, manifest, module)
    part = fold_rows(rows_of(weight), manifest, module)(start, stop)
    assert torch.allclose(part, whole[start:stop], rtol=0, atol=1e-6) and part.dtype == whole.dtype
    untouched = fold_weight(weight, folding(model, False), module)
    assert untouched.dtype == weight.dtype and torch.equal(untouched, weight)
    if module == "qkv":
        values = 4 * 24
        assert torch.equal(whole[:values], weight[:values].float())
        # Orthogonal, and really turned: blocks of 8 of the 24 channels.
        assert torch.allclose(whole[values:].T @ whole[values:], (w := weight[values:].float()).T @ w, atol=1e-3)
        assert (whole[values:] - w).norm() > 0.5 * w.norm()


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_conversion_folds_all_formats(method: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = str(tiny_checkpoint())
    options = {**QUICK, KEY: True, "int4.method": method}
    artifact = Artifact.open(convert(checkpoint, tmp_path / "folded", overrides=options).path, verify=True)
    assert artifact.manifest.kv_cache == replace(ROTATED, v_folded=True)
    with open_source(checkpoint) as source:
        model = source.spec
        own = source.load("model.layers.1.self_attn.o_proj.weight")
    expected = fold_weight(own, artifact.manifest, "o")
    for weight_format, bound in (("e4m3", 0.04), ("int4", 0.25)):
        found = artifact.dequantized("layers.1.o", weight_format)
        assert (found - expected).norm() < bound * expected.norm() < 0.3 * (found - own.float()).norm()
    assert model == artifact.manifest.model

    # Without calibration other code reads the rows, some at a time.
    blocks = convert(checkpoint, tmp_path / "blocks", overrides={KEY: True, "calibration.enabled": False})
    again = Artifact.open(blocks.path)
    for name in ("layers.0.qkv.e4m3", "layers.1.o.e4m3"):
        same = again.tensor(name).view(torch.uint8) == artifact.tensor(name).view(torch.uint8)
        assert same.double().mean() > 0.999

    exact = convert(checkpoint, tmp_path / "exact", overrides={**QUICK, "weights": ["bf16"]}).path
    logits = []
    for path, modes in ((exact, ("bf16", "bf16")), (artifact.path, ("int4", "e4m3"))):
        backend = reference.load(Artifact.open(path), decode_mode=modes[0], prefill_mode=modes[1])
        request = backend.open_request(64)
        backend.prefill([(request, list(range(3, 30)))])
        logits.append(backend.decode([(request, 30)]))
    # V rotated on one side only would leave nothing of the logits.
    assert (logits[1] - logits[0]).norm() < 0.5 * logits[0].norm()


def test_the_manifest_says_so_only_where_it_is_so(tiny_checkpoint: Make, tmp_path: Path) -> None:
    plans = [
        plan_conversion(str(tiny_checkpoint(f"c{fold}")), tmp_path / "out", overrides={**QUICK, KEY: fold})
        for fold in (False, True)
    ]
    texts = [plan.manifest.to_json() for plan in plans]
    assert [("v_folded" in json.loads(text)["kv_cache"]) for text in texts] == [False, True]
    assert [Manifest.from_json(text) for text in texts] == [plan.manifest for plan in plans]
    for key, value in (("bits", 16), ("rotation", False)):
        data = json.loads(texts[1])
        data["kv_cache"][key] = value
        with pytest.raises(ArtifactError, match=r"v_folded is true, expected bits 4 and rotation true"):
            Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache.bits": 16}, "kv_cache.bits is 16"),
        ({"kv_cache.rotation": False}, "kv_cache.rotation false, so nothing is rotated"),
        ({"weights": ["bf16", "int4"]}, "remove bf16 from weights"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("rtn", {KEY: True, **options})


def test_kept_codes_cannot_take_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_quantized(checkpoint, matrices_of(64), gptq_parts, gptq_config(64))
    with pytest.raises(PreflightError, match=r"codes of layers\.0\.qkv and \d+ more cannot take: .*--requantize"):
        convert(str(checkpoint), tmp_path / "out", overrides={**QUICK, KEY: True})
    requantized = plan_conversion(
        str(checkpoint), tmp_path / "out", overrides={**QUICK, KEY: True, "int4.requantize": "always"}
    )
    assert not requantized.errors


def test_the_cuda_backend_says_that_it_cannot_yet() -> None:
    manifest = folding(MODEL)
    for kv_cache in (None, "int4"):
        with pytest.raises(UnsupportedError, match=r"kv_cache\.v_folded.*rotate V themselves: choose kv_cache bf16"):
            choose_cache(manifest, kv_cache)
    assert choose_cache(manifest, "bf16").bits == 16
