"""Divergence against its definition, its quantiles and buckets, and `fut-run eval divergence`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from fut_convert import convert
from fut_runtime.cli import main
from fut_runtime.errors import FutError
from fut_runtime.evaluate.divergence import evaluate_divergence
from fut_runtime.evaluate.perplexity import evaluate_perplexity
from synthetic_checkpoint import CheckpointShape, write_checkpoint

VOCAB = 40


class FixedLogits:
    """A model whose logits depend on a token and a seed only."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
        self.table += noise * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


OURS, BASE = FixedLogits(2, 0.5), FixedLogits(3)
WINDOWS = torch.randint(VOCAB, (6, 31), generator=torch.Generator().manual_seed(4))


def definition() -> tuple[Tensor, Tensor, Tensor]:
    """KL, top-1 agreement and difference of log-likelihood [windows, positions], FP64, one position at a time."""
    kl, same, more = (torch.zeros(6, 30, dtype=torch.float64) for _ in range(3))
    for w, window in enumerate(WINDOWS.tolist()):
        for i in range(30):
            p, q = (model.table[window[i]].double().softmax(0) for model in (BASE, OURS))
            kl[w, i] = sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True))
            same[w, i] = float(int(p.argmax()) == int(q.argmax()))
            more[w, i] = math.log(float(p[window[i + 1]])) - math.log(float(q[window[i + 1]]))
    return kl, same, more


def test_figures_are_those_of_the_definition() -> None:
    kl, same, more = definition()
    result = evaluate_divergence(OURS, BASE, WINDOWS, buckets=4, worst=5, context_tokens=3)
    spans = [slice(0, 30), slice(0, 7), slice(7, 15), slice(15, 22), slice(22, 30)]
    for found, span in zip((result.overall, *result.buckets), spans, strict=True):
        for estimate, expected in ((found.kl, kl), (found.top1, same), (found.nll_difference, more)):
            means = expected[:, span].mean(dim=1)
            assert estimate.mean == pytest.approx(means.mean().item(), abs=1e-6)
            assert estimate.standard_error == pytest.approx(means.std().item() / 6**0.5, abs=1e-6)
    assert [part.positions for part in result.buckets] == [(1, 7), (8, 15), (16, 22), (23, 30)]
    ordered = kl.flatten().sort().values.tolist()
    assert result.kl_quantiles == pytest.approx(
        {"0.5": ordered[89], "0.9": ordered[161], "0.99": ordered[178], "0.999": ordered[179], "1": ordered[179]},
        abs=1e-6,
    )
    assert [one.kl for one in result.worst] == pytest.approx(ordered[:-6:-1], abs=1e-5)
    for one in result.worst:
        assert kl[one.window, one.position - 1].item() == pytest.approx(one.kl, abs=1e-5)
        window = WINDOWS[one.window].tolist()
        assert one.token == window[one.position]
        assert list(one.context) == window[max(0, one.position - 3) : one.position]
        assert one.nll - one.baseline_nll == pytest.approx(more[one.window, one.position - 1].item(), abs=1e-5)
        assert one.top == int(OURS.table[window[one.position - 1]].argmax())


def test_it_agrees_with_the_perplexity_report() -> None:
    divergence = evaluate_divergence(OURS, BASE, WINDOWS)
    perplexity = evaluate_perplexity(OURS, WINDOWS, baseline=BASE)
    assert divergence.perplexity == pytest.approx(perplexity.perplexity)
    assert divergence.baseline_perplexity == pytest.approx(perplexity.baseline_perplexity)
    assert perplexity.kl and perplexity.top1 and perplexity.nll_difference
    for ours, theirs in zip(
        (divergence.overall.kl, divergence.overall.top1, divergence.overall.nll_difference),
        (perplexity.kl, perplexity.top1, perplexity.nll_difference),
        strict=True,
    ):
        assert (ours.mean, ours.standard_error) == pytest.approx((theirs.mean, theirs.standard_error))


def test_a_model_does_not_diverge_from_itself() -> None:
    result = evaluate_divergence(BASE, BASE, WINDOWS, worst=1)
    assert result.overall.kl.mean == 0 and result.overall.top1.mean == 1 and result.kl_quantiles["1"] == 0


def test_too_many_buckets_and_likelihoods_that_are_no_numbers() -> None:
    with pytest.raises(FutError, match="31 buckets for 30 positions"):
        evaluate_divergence(OURS, BASE, WINDOWS, buckets=31)
    broken = FixedLogits(5)
    broken.table[int(WINDOWS[2, 4])] = torch.nan
    with pytest.raises(FutError, match="likelihoods are not finite"):
        evaluate_divergence(broken, BASE, WINDOWS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("divergence")
    checkpoint = write_checkpoint(directory / "checkpoint", CheckpointShape(layers=1))
    options = {"calibration.enabled": False, "int4.scale_method": "absmax_7"}
    convert(str(checkpoint), directory / "artifact", overrides=options)
    (directory / "text.txt").write_text("The tide comes in [twice] a day, and goes out as often. " * 8)
    return directory


def arguments(made: Path, *more: str) -> list[str]:
    baseline, text = str(made / "checkpoint"), str(made / "text.txt")
    options = ["--baseline", baseline, "--text", text, "--window", "24", "--max-windows", "3", *more]
    return ["eval", "divergence", str(made / "artifact"), *options]


@pytest.mark.parametrize("protocol", ["decode", "prefill", "serve"])
def test_the_command_for_programs(made: Path, protocol: str) -> None:
    options = ["--protocol", protocol, "--buckets", "3", "--worst", "2", "--json"]
    result = CliRunner().invoke(main, arguments(made, *options))
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["protocol"] == protocol and figures["windows"] == 3
    assert figures["overall"]["kl"]["mean"] > 0 and len(figures["buckets"]) == 3
    assert figures["kl_quantiles"]["0.5"] <= figures["kl_quantiles"]["1"] == pytest.approx(figures["worst"][0]["kl"])
    assert isinstance(figures["worst"][1]["token_text"], str) and figures["worst"][1]["context_text"]
    single = json.loads(CliRunner().invoke(main, arguments(made, "--max-windows", "1", "--json")).stdout)
    assert single["overall"]["kl"]["standard_error"] is None


def test_the_command_for_readers(made: Path) -> None:
    result = CliRunner().invoke(main, arguments(made, "--buckets", "2", "--worst", "3"))
    assert result.exit_code == 0, result.output
    for words in ("KL(checkpoint", "% of tokens below", "along the window", "worst tokens", "1–11", "12–23"):
        assert words in result.stdout


def test_mistakes_are_named(made: Path) -> None:
    for options, message in (
        (["--window", "9000"], "less than one window"),
        (["--buckets", "24"], "24 buckets for 23 positions"),
        (["--decode-mode", "bf16"], "choose decode_mode int4 or fp8"),
    ):
        result = CliRunner().invoke(main, arguments(made, *options))
        assert result.exit_code == 1 and message in result.stderr
