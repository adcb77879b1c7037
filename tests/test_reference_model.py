"""The reference model as a whole: chunking, decoding step by step or in parallel, batches, and FP8 prefill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from fp8_simulation import Sizes, quantize_weights, simulate_prefill
from fut_convert.checkpoint_model import model_from_checkpoint
from fut_convert.sources import open_source
from fut_runtime.artifact.layout import SITES
from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.errors import FutError
from fut_runtime.evaluate.perplexity import evaluate_perplexity
from fut_runtime.evaluate.runner import ReferenceRunner
from fut_runtime.evaluate.windows import cut_windows
from fut_runtime.reference.activation_scale import ActivationScales
from fut_runtime.reference.layer import LayerWeights, Sixteen, run_layer
from fut_runtime.reference.model import ReferenceModel
from fut_runtime.reference.numerics import EXACT, FP32, Numerics
from fut_runtime.reference.projection import Projection
from fut_runtime.rope import rope_tables
from odd_checkpoints import ODD_CHECKPOINTS, odd_input_ids, reference_logits
from synthetic_checkpoint import CheckpointShape, write_checkpoint

DOUBLE = Numerics(dtype=torch.float64, round_activations=False)
INT4_CACHE = KVCacheSpec(bits=4, rotation=True, zero_point=True)


@pytest.fixture
def double_model(tmp_path: Path) -> ReferenceModel:
    """A tiny model in FP64 with an INT4 cache: the same mathematics gives the same codes in any order of summation."""
    path = write_checkpoint(tmp_path / "tiny", CheckpointShape(heads=4, kv_heads=2, head_dim=64, hidden=128))
    with open_source(str(path)) as source:
        return replace(model_from_checkpoint(source, numerics=DOUBLE), kv_cache=INT4_CACHE)


def token_ids(count: int, vocab_size: int = 384) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(3))


def test_decoding_in_parallel_equals_decoding_step_by_step(double_model: ReferenceModel) -> None:
    ids = token_ids(40)
    whole, steps = double_model.new_cache(40), double_model.new_cache(40)
    parallel = double_model.forward(whole, ids, "decode")
    stepwise = torch.cat([double_model.forward(steps, ids[i : i + 1], "decode") for i in range(40)])
    torch.testing.assert_close(parallel, stepwise)
    for layer in range(double_model.spec.num_layers):
        for a, b in zip(whole.codes(layer), steps.codes(layer), strict=True):
            assert torch.equal(a.codes, b.codes)


def test_serve_protocol_equals_prefill_then_steps(double_model: ReferenceModel) -> None:
    ids = token_ids(30)
    parallel = ReferenceRunner(double_model, "serve", serve_prefill_tokens=17).hidden(ids)
    cache = double_model.new_cache(30)
    parts = [double_model.forward(cache, ids[:17], "prefill")]
    parts += [double_model.forward(cache, ids[i : i + 1], "decode") for i in range(17, 30)]
    torch.testing.assert_close(parallel, torch.cat(parts))


@pytest.mark.parametrize("cuts", [[1, 39], [16, 16, 8], [39, 1]])
def test_chunked_prefill_equals_prefill_in_one_piece(double_model: ReferenceModel, cuts: list[int]) -> None:
    ids = token_ids(40)
    expected = double_model.forward(double_model.new_cache(40), ids, "prefill")
    cache = double_model.new_cache(40)
    got = torch.cat([double_model.forward(cache, part, "prefill") for part in ids.split(cuts)])
    torch.testing.assert_close(got, expected)


def test_a_prompt_that_continues_after_decoding_sees_the_decode_cache(double_model: ReferenceModel) -> None:
    ids = token_ids(30)
    cache = double_model.new_cache(30)
    double_model.forward(cache, ids[:10], "prefill")
    double_model.forward(cache, ids[10:11], "decode")
    got = double_model.forward(cache, ids[11:], "prefill")
    untouched = double_model.forward(double_model.new_cache(30), ids, "prefill")[11:]
    quantised = double_model.forward(double_model.new_cache(30), ids, "decode")[11:]
    spread = (untouched - quantised).norm()
    assert 0 < (got - untouched).norm() < spread
    assert bool(got.isfinite().all())


def test_forward_refuses_what_it_cannot_run(double_model: ReferenceModel) -> None:
    cache = double_model.new_cache(4)
    with pytest.raises(FutError, match="outside the vocabulary of 384"):
        double_model.forward(cache, [384], "prefill")
    with pytest.raises(FutError, match="opened for 4"):
        double_model.forward(cache, [1, 2, 3, 4, 5], "prefill")
    with pytest.raises(FutError, match="at least one token"):
        double_model.forward(cache, [], "decode")


def test_windows_drop_the_tail_and_refuse_short_texts() -> None:
    assert cut_windows(range(10), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut_windows(range(10), 4, max_windows=1).shape == (1, 4)
    with pytest.raises(FutError, match="3 tokens, less than one window of 4"):
        cut_windows(range(3), 4)


def test_perplexity_and_divergence_against_a_direct_computation(double_model: ReferenceModel) -> None:
    windows = token_ids(60).view(3, 20)
    plain = replace(double_model, kv_cache=KVCacheSpec(bits=16, rotation=False, zero_point=False))
    ours, base = ReferenceRunner(double_model, "decode"), ReferenceRunner(plain, "prefill")
    result = evaluate_perplexity(ours, windows, baseline=base)
    rows = []
    for window in windows:
        a, b = (torch.log_softmax(r.logits(r.hidden(window))[:-1], -1) for r in (ours, base))
        nll = [-x.gather(1, window[1:, None]).mean() for x in (a, b)]
        rows.append([*nll, (b.exp() * (b - a)).sum(1).mean(), (a.argmax(1) == b.argmax(1)).double().mean()])
    nll, base_nll, kl, top1 = torch.tensor(rows, dtype=torch.float64).unbind(1)
    assert result.perplexity == pytest.approx(nll.mean().exp().item(), rel=1e-5)
    assert result.baseline_perplexity == pytest.approx(base_nll.mean().exp().item(), rel=1e-5)
    assert result.kl is not None and result.top1 is not None and result.nll_difference is not None
    assert result.kl.mean == pytest.approx(kl.mean().item(), rel=5e-3)
    assert result.top1.mean == pytest.approx(top1.mean().item())
    difference = nll - base_nll
    assert result.nll_difference.standard_error == pytest.approx((difference.std() / 3**0.5).item(), rel=5e-3)


@pytest.mark.parametrize("name", ODD_CHECKPOINTS)
def test_odd_checkpoints_equal_transformers(name: str, odd_checkpoint: object) -> None:
    pytest.importorskip("transformers", reason="transformers gives the reference logits")
    path = odd_checkpoint(name)  # type: ignore[operator]
    ids = odd_input_ids()
    with open_source(str(path)) as source:
        model = model_from_checkpoint(source)
    got = model.logits(model.forward(model.new_cache(ids.numel()), ids.flatten(), "prefill"))
    torch.testing.assert_close(got, reference_logits(path, ids)[0], rtol=0, atol=1e-3)


def eight_bit(model: ReferenceModel) -> ReferenceModel:
    """The model with E4M3 weights made by torch's own cast."""
    layers = []
    for layer in model.prefill:
        projections = {}
        for module, projection in layer.projections.items():
            assert isinstance(projection.weight, Tensor)
            weight = projection.weight if projection.gain is None else projection.weight * projection.gain
            scale = (weight.abs().amax(1) / 448).clamp_min(1e-30)
            codes = (weight / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            projections[module] = Projection(codes, channel_scale=scale, bias=projection.bias)
        layers.append(LayerWeights(projections))
    return replace(model, prefill=layers, numerics=EXACT, eight_bit=True)


def perplexity(logits: Tensor, ids: Tensor) -> float:
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).exp().item()


def unquantised_maxima(model: ReferenceModel, ids: Tensor) -> Tensor:
    """Absolute maxima [layers, 4] of the E4M3 sites when nothing is quantised."""
    maxima = torch.zeros(model.spec.num_layers, len(SITES))
    h, rope = model.embed[ids].float(), rope_tables(model.spec, torch.arange(len(ids)))
    for index, layer in enumerate(model.prefill):

        def observe(site: str, _: Tensor, stored: Tensor, index: int = index) -> None:
            maxima[index, SITES.index(site)] = stored.abs().max()

        h = run_layer(model.spec, layer, Sixteen(FP32, model.spec.rms_norm_eps, observe), FP32, h, rope)
    return maxima


def test_fp8_prefill_of_a_real_model_equals_an_independent_simulation(
    smollm2_dir: Path, calibration_text: Path
) -> None:
    tensors = load_file(smollm2_dir / "model.safetensors")
    text = calibration_text.read_text(encoding="utf-8")[:5000]
    ids = torch.tensor(Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(text).ids[:200])
    with open_source(str(smollm2_dir)) as source:
        plain, spec = model_from_checkpoint(source), source.spec
    initial = unquantised_maxima(plain, ids) / 448
    model = replace(eight_bit(plain), numerics=Numerics(dtype=torch.float64))
    del plain
    sizes = Sizes(spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope.theta, spec.rms_norm_eps)
    weights = quantize_weights(tensors, sizes)
    scales = initial
    for _ in range(2):
        state = ActivationScales(scales, 1.0, frozen=False)
        expected, maxima = simulate_prefill(tensors, weights, sizes, scales, ids)
        got = model.logits(model.forward(model.new_cache(len(ids)), ids, "prefill", state))
        assert perplexity(got, ids) == pytest.approx(perplexity(expected, ids), rel=1e-3)
        # Delay: what this call saw is the next one's scale.
        state.next_call()
        scales = maxima / 448
        torch.testing.assert_close(state.scale, scales, rtol=0.02, atol=0)
