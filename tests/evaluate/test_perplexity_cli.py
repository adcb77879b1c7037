"""`fut-run eval perplexity`: figures a program can read, and every mistake as one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from fut_convert import convert
from fut_runtime.cli import main
from synthetic_checkpoint import CheckpointShape, tokenizer_json, write_checkpoint

QUICK = {"calibration.enabled": False, "int4.scale_method": "absmax_7"}
Change = Callable[[dict[str, Tensor]], None]


def make(directory: Path, change: Change | None = None, tokenizer: str | None = None) -> Path:
    """An artifact beside the checkpoint it was made from."""
    checkpoint = write_checkpoint(directory / "checkpoint", CheckpointShape(layers=1), change)
    if tokenizer is not None:
        (checkpoint / "tokenizer.json").write_text(tokenizer)
    return convert(str(checkpoint), directory / "artifact", overrides=QUICK).path


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture
def evaluate(tmp_path: Path) -> Callable[..., Result]:
    text = tmp_path / "text.txt"
    text.write_text("The tide comes in twice a day, and goes out as often. " * 4)

    def run(artifact: Path, *args: object) -> Result:
        options = ["--text", str(text), "--window", "16", "--max-windows", "2", *map(str, args)]
        return CliRunner().invoke(main, ["eval", "perplexity", str(artifact), *options])

    return run


def test_figures_for_programs_and_for_readers(artifact: Path, evaluate: Callable[..., Result]) -> None:
    result = evaluate(artifact, "--baseline", artifact.parent / "checkpoint", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["windows"], figures["window_tokens"]) == (2, 16)
    assert figures["perplexity"] > 1 and figures["kl"]["mean"] > 0 and 0 <= figures["top1"]["mean"] <= 1
    single = json.loads(evaluate(artifact, "--max-windows", "1", "--json").stdout)
    assert single["nll"]["standard_error"] is None
    assert "KL(checkpoint" in evaluate(artifact, "--baseline", artifact.parent / "checkpoint").stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "nonsense"], "device is 'nonsense'"),
        (["--device", "cuda:99"], "but PyTorch sees"),
        (["--device", "meta"], "which PyTorch cannot use here"),
        (["--window", "4096"], "less than one window"),
        (["--decode-mode", "bf16"], "choose decode_mode int4 or fp8"),
        (["--baseline", "/nowhere"], "no such file or directory"),
    ],
)
def test_mistakes_are_named(artifact: Path, evaluate: Callable[..., Result], args: list[str], message: str) -> None:
    result = evaluate(artifact, *args)
    assert result.exit_code == 1 and message in result.stderr


def test_a_baseline_with_another_vocabulary(artifact: Path, evaluate: Callable[..., Result], tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", CheckpointShape(layers=1, vocab_size=400))
    result = evaluate(artifact, "--baseline", other)
    assert result.exit_code == 1 and "has 400 tokens in its vocabulary" in result.stderr


@pytest.mark.parametrize(
    ("tokenizer", "message"), [("{}", "the tokenizers library cannot read it"), (None, "outside the vocabulary")]
)
def test_a_tokenizer_that_is_broken_or_another_models(
    evaluate: Callable[..., Result], tmp_path: Path, tokenizer: str | None, message: str
) -> None:
    artifact = make(tmp_path, tokenizer=tokenizer_json(600) if tokenizer is None else tokenizer)
    result = evaluate(artifact)
    assert result.exit_code == 1 and message in result.stderr


def test_a_hopeless_model_has_an_infinite_perplexity(evaluate: Callable[..., Result], tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] *= torch.tensor(1e6, dtype=torch.bfloat16)

    artifact = make(tmp_path, change)
    assert json.loads(evaluate(artifact, "--json").stdout)["perplexity"] is None
    assert "inf" in evaluate(artifact).stdout
