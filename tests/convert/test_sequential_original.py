"""What a quantized module is told to put out: that of the checkpoint's own layer beside it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fut_convert.calibration import Calibration, calibration_layer
from fut_convert.checkpoint_model import module_bias, module_gain, module_weight
from fut_convert.original_layer import OriginalLayer
from fut_convert.sequential import SequentialCalibration
from fut_convert.sixteen_bit import SixteenBitProjection
from fut_convert.sources import open_source
from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.reference.layer import LayerWeights, Sixteen, run_layer
from fut_runtime.reference.numerics import EXACT

CPU = torch.device("cpu")


def perturbed(projection: SixteenBitProjection, seed: int) -> SixteenBitProjection:
    """A stand-in for a quantized module: the same with noise on its weights."""
    assert isinstance(projection.weight, Tensor)
    noise = torch.randn(projection.weight.shape, generator=torch.Generator().manual_seed(seed))
    weight = projection.weight.float() + 0.1 * projection.weight.float().std() * noise
    return SixteenBitProjection(weight.bfloat16(), gain=projection.gain, bias=projection.bias)


def inputs_of(model: ModelSpec, layer: LayerWeights, calibration: Calibration) -> dict[str, list[Tensor]]:
    """Module -> product input before the gain, and the site's hidden state or input, of all tokens."""
    seen: dict[str, list[tuple[Tensor, ...]]] = {}

    def observe(site: str, *both: Tensor) -> None:
        seen.setdefault(site, []).append(both)

    products = Sixteen(EXACT, model.rms_norm_eps, observe)
    for batch in calibration.batches():
        run_layer(model, layer, products, EXACT, batch.states.float(), batch.rope, batch.attend)
    return {site: [torch.cat(parts) for parts in zip(*batches, strict=True)] for site, batches in seen.items()}


def states(calibration: Calibration) -> Tensor:
    """All hidden states."""
    return torch.cat([*calibration.hidden.parts(slice(0, calibration.count))])


@pytest.mark.parametrize("name", ["base", "qwen2_biases", "qwen3_qk_norm"])
def test_it_is_the_output_of_the_original_and_the_error_of_the_stream(
    name: str, odd_checkpoint: Callable[[str], Path]
) -> None:
    with open_source(str(odd_checkpoint(name))) as source:
        model, embed = source.spec, source.load("model.embed_tokens.weight")
        windows = torch.randint(3, 384, (3, 40), generator=torch.Generator().manual_seed(1))
        weights = {m: module_weight(source.load, 0, m) for m in MODULES}
        gains = {m: g for m in MODULES if (g := module_gain(source.load, 0, m)) is not None}
        biases = {m: module_bias(source.load, 0, m) for m in MODULES if model.module_bias(m)}
        norms = None
        if model.qk_norm:
            q, k = (source.load(f"model.layers.0.self_attn.{n}_norm.weight").float() for n in "qk")
            norms = (q, k)
    layer = calibration_layer(weights, gains, biases, norms, CPU)
    own = Calibration(model, windows, embed, CPU)
    # What came before is quantized too: the stream has an error of its own.
    other = embed.float() + 0.05 * embed.float().std() * torch.randn(embed.shape, generator=torch.Generator())
    quantized, again = (SequentialCalibration(model, windows, other, CPU) for _ in range(2))
    alone = Calibration(model, windows, embed, CPU)
    noisy = {m: perturbed(p, i) for i, (m, p) in enumerate(layer.projections.items())}  # type: ignore[arg-type]
    told: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(module: str, hessian: Tensor, wanted: Tensor | None) -> SixteenBitProjection:
        assert wanted is not None
        told[module] = (hessian, wanted)
        return noisy[module]

    original = OriginalLayer(own, layer)
    quantized.quantize_layer(gains, norms, keep, original)
    assert list(told) == list(MODULES)

    theirs = inputs_of(model, layer, alone)
    # Beside the quantized layer the original has run as it does by itself.
    expected_statistics, statistics = alone.run_layer(layer), original.statistics()
    # Nothing keeps the layer's weights until the garbage collector comes: on a card the next layer is beside them.
    gone = weakref.ref(original)
    gc.disable()
    try:
        del original
        assert gone() is None
    finally:
        gc.enable()
    assert torch.equal(states(own), states(alone))
    assert statistics.amax == expected_statistics.amax
    for module, moment in expected_statistics.second_moment.items():
        assert torch.equal(statistics.second_moment[module], moment), module

    ours = inputs_of(model, LayerWeights(noisy, layer.q_norm, layer.k_norm), again)
    for module, (hessian, wanted) in told.items():
        gain = gains.get(module, torch.ones(()))
        x0, x = (side[module][0].double() * gain for side in (theirs, ours))
        t = x0 @ weights[module].double().T
        # The residual stream where the module's output is added is what the first and the second norm saw.
        if (stream := {"o": "qkv", "down": "gate_up"}.get(module)) is not None:
            t = t + theirs[stream][1].double() - ours[stream][1].double()
        expected = t.T @ x / len(x)
        assert (wanted - expected).norm() < 0.01 * expected.norm()
        if module != "qkv":
            # Neither the quantized module's own output nor that of its weight before would pass.
            for wrong in (noisy[module].weight, weights[module]):
                assert isinstance(wrong, Tensor)
                assert (wrong.double() @ hessian.double() - expected).norm() > 0.015 * expected.norm()
