"""Evaluations over a backend that gives logits chunk by chunk: the same figures, and `--backend` of `fut-run eval`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from fake_backend import FakeBackend, model_spec
from fut_convert import convert
from fut_runtime.cli import main
from fut_runtime.errors import FutError
from fut_runtime.evaluate import options, perplexity
from fut_runtime.evaluate.perplexity import evaluate_perplexity, score_positions
from fut_runtime.evaluate.runner import BackendRunner
from fut_runtime.reference import backend as reference
from synthetic_checkpoint import CheckpointShape, write_checkpoint

VOCAB = 40


class InChunks(FakeBackend):
    """Gives the logits within a prompt `step` tokens at a time, always in the same memory, as a card does."""

    step = 7

    def prompt_logits(self, request: int, ids: Sequence[int]) -> Iterator[Tensor]:
        memory = torch.empty(self.step, self.spec.vocab_size)
        for first in range(0, len(ids), self.step):
            part = ids[first : first + self.step]
            memory[: len(part)] = torch.stack([self._append(request, [token]) for token in part])
            yield memory[: len(part)]
            memory.fill_(torch.nan)


class WholeWindow:
    """The same model, run as the reference is."""

    def hidden(self, tokens: Tensor) -> Tensor:
        fake = FakeBackend(model_spec(VOCAB, context=len(tokens)))
        request = fake.open_request(len(tokens))
        return torch.cat([fake.prefill([(request, [token])]) for token in tokens.tolist()])

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize(("step", "rows"), [(7, 5), (3, 8), (64, 16), (5, 5), (1, 40)])
def test_logits_in_chunks_give_the_figures_of_whole_windows(
    step: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "LOGIT_ROWS", rows)
    backend = InChunks(model_spec(VOCAB, context=33))
    monkeypatch.setattr(backend, "step", step)
    runner = BackendRunner(backend)
    windows = torch.randint(VOCAB, (3, 33), generator=torch.Generator().manual_seed(step))
    found = score_positions(runner, WholeWindow(), windows[0])
    assert torch.equal(found.nll, found.baseline_nll) and torch.equal(found.top, found.baseline_top)
    assert len(found.nll) == 32 and not found.kl.any()
    assert evaluate_perplexity(runner, windows) == evaluate_perplexity(WholeWindow(), windows)
    assert not backend.open


def test_a_backend_without_logits_within_a_prompt_is_refused() -> None:
    with pytest.raises(FutError, match="FakeBackend gives no logits within a prompt: choose the reference backend"):
        BackendRunner(FakeBackend(model_spec(VOCAB)))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("backend")
    checkpoint = write_checkpoint(directory / "checkpoint", CheckpointShape(layers=1))
    overrides = {"calibration.enabled": False, "int4.scale_method": "absmax_7"}
    return convert(str(checkpoint), directory / "artifact", overrides=overrides).path


def run(artifact: Path, tmp_path: Path, *args: str) -> Result:
    text = tmp_path / "text.txt"
    text.write_text("The tide comes in twice a day, and goes out as often. " * 4)
    given = [str(artifact), "--text", str(text), "--window", "16", "--max-windows", "2", *args]
    return CliRunner().invoke(main, ["eval", "perplexity", *given])


def test_the_command_line_scores_what_the_backend_says(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(opened: object, name: str, **modes: object) -> InChunks:
        asked.append((name, modes))
        return InChunks(reference.load(opened).spec)  # type: ignore[arg-type]

    monkeypatch.setattr(options, "load_backend", load)
    args = ["--backend", "cuda", "--device", "cpu", "--decode-mode", "fp8", "--json"]
    result = run(artifact, tmp_path, *args)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["backend"], figures["decode_mode"], figures["kv_cache"]) == ("cuda", "fp8", "int4")
    assert figures["perplexity"] > 1
    modes = {"device": "cpu", "decode_mode": "fp8", "kv_cache": None, "compute": "exact", "planned_tokens": 16}
    modes["prefill_mode"] = "decode"
    assert asked == [("cuda", modes)]


@pytest.mark.parametrize(("protocol", "decoded"), [("decode", 0), ("prefill", 0), ("serve", 1)])
def test_serve_decodes_from_the_middle_on(protocol: str, decoded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = InChunks(model_spec(VOCAB, context=33))
    prompts, steps = [], []
    prompt_logits, decode = backend.prompt_logits, backend.decode
    monkeypatch.setattr(backend, "prompt_logits", lambda r, ids: prompts.append(len(ids)) or prompt_logits(r, ids))
    monkeypatch.setattr(backend, "decode", lambda tokens: steps.append(tokens[0][1]) or decode(tokens))
    window = torch.randint(VOCAB, (33,), generator=torch.Generator().manual_seed(3))
    found = score_positions(BackendRunner(backend, protocol), WholeWindow(), window)
    assert torch.equal(found.nll, found.baseline_nll)
    # The window's last token is scored, not read.
    assert (prompts, steps) == (([16, 15], [int(window[16])]) if decoded else ([32], []))


@pytest.mark.parametrize(("protocol", "mode"), [("serve", "e4m3"), ("prefill", "bf16")])
def test_protocols_choose_how_prompts_are_read(
    artifact: Path, tmp_path: Path, protocol: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def load(opened: object, name: str, **modes: object) -> InChunks:
        asked.update(modes)
        return InChunks(reference.load(opened).spec)  # type: ignore[arg-type]

    monkeypatch.setattr(options, "load_backend", load)
    args = ["--backend", "cuda", "--device", "cpu", "--protocol", protocol, "--prefill-mode", mode]
    assert run(artifact, tmp_path, *args, "--scale-mode", "frozen").exit_code == 0
    assert (asked["prefill_mode"], asked.get("scale_mode")) == (mode, "frozen" if mode == "e4m3" else None)
