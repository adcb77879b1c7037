"""The corrected weight against least squares solved directly."""

from __future__ import annotations

import pytest
import torch

from fut_convert.quantize.correction import corrected_weight
from fut_convert.quantize.gptq import GptqSettings, damped_hessian, factorize


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("chunk", [1 << 24, 7 * 24])
def test_it_is_the_ridge_regression_towards_the_weight(
    act_order: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fut_convert.quantize.correction.error_chunk", lambda _: chunk)
    generator = torch.Generator().manual_seed(0)
    tokens, rows, columns, damping = 200, 10, 24, 0.05
    own = torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    x = own + 0.3 * torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    x *= torch.linspace(0.1, 5, columns, dtype=torch.float64)
    weight = torch.randn(rows, columns, generator=generator)
    target = own @ weight.double().T + 0.1 * torch.randn(tokens, rows, generator=generator, dtype=torch.float64)
    hessian, wanted = x.T @ x / tokens, target.T @ x / tokens
    factor = factorize(hessian, GptqSettings(damping=damping, act_order=act_order))
    assert factor is not None
    # Σ|t - V x|² + λ·tokens·|V - W|² as one least-squares problem.
    ridge = (damping * hessian.diagonal().mean() * tokens).sqrt() * torch.eye(columns, dtype=torch.float64)
    found = torch.linalg.lstsq(torch.cat([x, ridge]), torch.cat([target, ridge @ weight.double().T])).solution.T
    whole = corrected_weight(weight, hessian, wanted.float(), factor, 1.0)
    assert torch.allclose(whole.double(), found, rtol=1e-4, atol=1e-5)
    half = corrected_weight(weight, hessian, wanted.float(), factor, 0.5)
    assert torch.allclose(half.double(), (weight.double() + found) / 2, rtol=1e-4, atol=1e-5)


def test_what_the_weight_puts_out_already_changes_nothing() -> None:
    x = torch.randn(100, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    hessian = x.T @ x / len(x)
    factor = factorize(hessian, GptqSettings())
    assert factor is not None
    wanted = (weight.double() @ hessian).float()
    assert torch.allclose(corrected_weight(weight, hessian, wanted, factor, 1.0), weight, atol=1e-5)


def test_columns_that_were_never_active_stay() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(100, 32, generator=generator, dtype=torch.float64)
    x[:, 5] = x[:, 20:] = 0
    weight = torch.randn(8, 32, generator=generator)
    hessian, wanted = x.T @ x / len(x), torch.randn(100, 8, generator=generator, dtype=torch.float64).T @ x / len(x)
    factor = factorize(hessian, GptqSettings())
    assert factor is not None
    found = corrected_weight(weight, hessian, wanted.float(), factor, 1.0)
    assert torch.equal(found[:, 20:], weight[:, 20:]) and torch.equal(found[:, 5], weight[:, 5])
    expected = weight + (wanted - weight.double() @ hessian) @ torch.linalg.inv(damped_hessian(hessian, 0.01).double())
    assert torch.allclose(found.double(), expected, atol=1e-5)
