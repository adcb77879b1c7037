"""The reference arithmetic's parts against slow or independent forms of the same mathematics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.spec import ModelSpec, RopeSpec
from fut_runtime.reference.activation_scale import ActivationScales
from fut_runtime.reference.attention import attend, attend_quantized
from fut_runtime.reference.kv_quant import quantize_heads
from fut_runtime.reference.numerics import EXACT, Numerics, to_e4m3
from fut_runtime.reference.rope import apply_rope
from fut_runtime.reference.rotation import rotate, sylvester_hadamard
from fut_runtime.rope import inverse_frequencies, rope_tables

DOUBLE = Numerics(dtype=torch.float64, round_activations=False)


def model(head_dim: int = 64, heads: int = 4, kv_heads: int = 2, **rope: object) -> ModelSpec:
    return ModelSpec(
        "LlamaForCausalLM",
        256,
        512,
        2,
        heads,
        kv_heads,
        head_dim,
        128,
        1e-5,
        2048,
        RopeSpec(**rope),
        False,  # type: ignore[arg-type]
    )


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("n", [1, 2, 16, 32, 64, 128])
def test_hadamard_is_symmetric_and_orthogonal(n: int) -> None:
    h = sylvester_hadamard(n).to(torch.int64)
    assert torch.equal(h, h.T)
    assert torch.equal(h @ h, n * torch.eye(n, dtype=torch.int64))


def test_hadamard_refuses_other_orders() -> None:
    with pytest.raises(ValueError, match="power of two"):
        sylvester_hadamard(12)


@pytest.mark.parametrize(("head_dim", "block"), [(64, 64), (80, 16), (96, 32), (128, 128)])
def test_rotation_is_its_own_inverse_and_keeps_products(head_dim: int, block: int) -> None:
    assert model(head_dim).rotation_block == block
    signs = sylvester_hadamard(block)
    q, k = random(5, 3, head_dim), random(5, 3, head_dim, seed=1)
    torch.testing.assert_close(rotate(rotate(q, signs), signs), q)
    torch.testing.assert_close((rotate(q, signs) * rotate(k, signs)).sum(-1), (q * k).sum(-1))


def test_rope_turns_half_split_pairs_by_position() -> None:
    spec = model()
    cos, sin = rope_tables(spec, torch.tensor([0, 1, 7]))
    x = random(3, 2, 64, dtype=torch.float32)
    got = apply_rope(x, cos, sin)
    for row, position in enumerate((0, 1, 7)):
        for d in range(32):
            angle = np.float64(position) * 10000.0 ** (-2 * d / 64)
            pair = complex(x[row, 1, d], x[row, 1, d + 32]) * np.exp(1j * angle)
            assert abs(got[row, 1, d].item() - pair.real) < 1e-5
            assert abs(got[row, 1, d + 32].item() - pair.imag) < 1e-5


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn_mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16.0,
                    "beta_slow": 2.0, "original_max_position_embeddings": 512},
    "yarn_not_truncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                           "original_max_position_embeddings": 512},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("tokens", [100, 5000])
def test_rope_scalings_equal_transformers(name: str, tokens: int) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of RoPE scalings")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    params = ROPES[name]
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **params},
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS[str(params["rope_type"])](config, torch.device("cpu"), seq_len=tokens)
    rest = {k: v for k, v in params.items() if k != "rope_type"}
    got, got_factor = inverse_frequencies(model(type=params["rope_type"], **rest), planned_tokens=tokens)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert got_factor == pytest.approx(factor)


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("rotation", [False, True])
def test_kv_quantisation_stays_within_half_a_step(rotation: bool, zero_point: bool) -> None:
    spec = KVCacheSpec(rotation=rotation, zero_point=zero_point)
    signs = sylvester_hadamard(16)
    x = random(50, 2, 80) * 10 + 3
    q = quantize_heads(x, spec, signs)
    target = rotate(x, signs) if rotation else x
    # The scale is a BF16 number: up to 2^-8 of a step is lost at each of 15 levels on top of the half step.
    limit = q.scale.double()[..., None] * (0.5 + 16 / 256)
    assert bool(((q.dequantized(torch.float64) - target).abs() <= limit).all())
    assert q.codes.max() <= 15
    assert q.scale.dtype == q.zero.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_kv_quantisation_of_a_constant_head(value: float) -> None:
    x = torch.full((1, 1, 64), value, dtype=torch.float64)
    for zero_point in (False, True):
        q = quantize_heads(x, KVCacheSpec(rotation=False, zero_point=zero_point), sylvester_hadamard(64))
        torch.testing.assert_close(q.dequantized(torch.float64), x, rtol=2**-8, atol=0)


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (9, 3, 64), (8, 1, 80), (5, 1, 96)])
def test_quantised_attention_equals_attention_over_dequantised_heads(
    heads: int, kv_heads: int, head_dim: int, rotation: bool
) -> None:
    signs = sylvester_hadamard(head_dim & -head_dim)
    spec = KVCacheSpec(rotation=rotation)
    q = random(7, heads, head_dim)
    k, v = (quantize_heads(random(30, kv_heads, head_dim, seed=s), spec, signs) for s in (1, 2))

    def plain(x: object) -> torch.Tensor:
        values = x.dequantized(torch.float64)  # type: ignore[attr-defined]
        return rotate(values, signs) if rotation else values

    got = attend_quantized(q, k, v, spec, signs, DOUBLE)
    torch.testing.assert_close(got, attend(q, plain(k), plain(v), DOUBLE))


def test_attention_equals_a_loop_over_queries_and_heads() -> None:
    q, k, v = random(600, 6, 16), random(700, 2, 16, seed=1), random(700, 2, 16, seed=2)
    got = attend(q, k, v, DOUBLE)
    for i in (0, 1, 511, 512, 599):
        for head in range(6):
            keys, values = k[: 101 + i, head // 3], v[: 101 + i, head // 3]
            p = torch.softmax(keys @ q[i, head] / 4, dim=0)
            torch.testing.assert_close(got[i, head], p @ values)


def test_later_tokens_do_not_reach_earlier_queries() -> None:
    q, k, v = random(8, 2, 16), random(8, 1, 16, seed=1), random(8, 1, 16, seed=2)
    before = attend(q, k, v, DOUBLE)[:5]
    k[5:], v[5:] = 1e6, 1e6
    torch.testing.assert_close(attend(q, k, v, DOUBLE)[:5], before)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), st.floats(2**-20, 2**10, width=32))
def test_e4m3_saturates_and_counts(values: list[float], scale: float) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    got, saturated = to_e4m3(x, torch.tensor(scale))
    assert bool(got.isfinite().all())
    assert bool((got.abs() <= 448).all())
    scaled = x.double() / scale
    inside = scaled.abs() <= 440
    # Three mantissa bits: half a unit in the last place is 2^-4 relative, 2^-10 among subnormals.
    assert bool(((got.double() - scaled).abs() <= scaled.abs() * 2**-4 + 2**-10)[inside].all())
    assert abs(int(saturated) - int((scaled.abs() > 448).sum())) <= int((scaled.abs() - 448).abs().lt(1e-3).sum())


def scales(margin: float = 1.0, frozen: bool = False) -> ActivationScales:
    return ActivationScales(torch.full((2, 4), 0.5), margin, frozen=frozen)


def test_delayed_scales_take_effect_at_the_next_call() -> None:
    state = scales(margin=2.0)
    x = torch.tensor([[1.0, -896.0]])
    values, scale = state.quantize(1, "o", x)
    assert scale.item() == 0.5
    assert values.tolist() == [[2.0, -448.0]]
    assert state.saturated[1, 1] == 1
    state.next_call()
    assert state.scale[1, 1].item() == 2.0 * 896 / 448
    assert state.scale[0, 0].item() == 0.5
    assert state.ignored == 0


def test_a_call_takes_the_maximum_over_its_requests() -> None:
    state = scales()
    for value in (3.0, 448.0, 5.0):
        state.quantize(0, "down", torch.tensor([[value]]))
    state.next_call()
    assert state.scale[0, 3].item() == 1.0


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_unusable_maxima_keep_the_scale(value: float) -> None:
    state = scales()
    state.quantize(0, "qkv", torch.tensor([[value, 0.0]]))
    state.next_call()
    assert state.scale[0, 0].item() == 0.5
    assert state.ignored == 1


def test_frozen_scales_stay() -> None:
    state = scales(frozen=True)
    state.quantize(0, "qkv", torch.tensor([[1000.0]]))
    state.next_call()
    assert state.scale[0, 0].item() == 0.5


def test_rounding_points_hold_sixteen_bit_values() -> None:
    x = random(100, dtype=torch.float32)
    assert torch.equal(EXACT.round16(x), x.bfloat16().float())
    assert torch.equal(DOUBLE.round16(x.double()), x.double())
