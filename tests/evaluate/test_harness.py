"""The engine as lm-eval's model, and multiple choice from local files."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'futransformer[eval]'")

from fut_convert import convert
from fut_runtime import Engine, SamplingParams
from fut_runtime.cli import main
from fut_runtime.errors import FutError
from fut_runtime.evaluate.continuations import ReferenceScorer
from fut_runtime.evaluate.harness import EngineLM
from fut_runtime.evaluate.multiple_choice import ask, hub_task, local_task, summarize
from fut_runtime.evaluate.runner import ReferenceRunner
from synthetic_checkpoint import CheckpointShape, write_checkpoint

# fmt: off
WORDS = [
    "tide", "moon", "salt", "wind", "sand", "rock", "gull", "wave", "foam", "pier", "rope", "sail", "mast", "keel",
    "hull", "deck",
]
# fmt: on
QUESTIONS = [
    {
        "question": f"Which goes with {WORDS[i]} and {WORDS[-i]}?",
        "choices": {"text": [WORDS[i + 1], WORDS[i + 2] + " of the sea", WORDS[i + 3]], "label": ["A", "B", "C"]},
        "answerKey": "ABC"[i % 3],
    }
    for i in range(1, 9)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint, its artifact, and questions for both tasks."""
    directory = tmp_path_factory.mktemp("harness")
    checkpoint = write_checkpoint(directory / "checkpoint", CheckpointShape(layers=1, max_positions=128))
    options = {"calibration.enabled": False, "int4.scale_method": "absmax_7"}
    convert(str(checkpoint), directory / "artifact", overrides=options)
    (directory / "arc.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    lines = ({"ctx": q["question"], "endings": q["choices"]["text"], "label": 1} for q in QUESTIONS)  # type: ignore[index]
    (directory / "hellaswag.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return directory


@pytest.fixture
def model(made: Path) -> EngineLM:
    return EngineLM(Engine(made / "artifact", backend="reference", device="cpu", compute="fp32"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection can be opened."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def request(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def test_likelihoods_are_those_of_the_engines_logprobs(model: EngineLM) -> None:
    """Greedy generation reports log-probabilities of its own: scored as a continuation they must add up."""
    prompt = "The tide comes in"
    completion = model.engine.generate([prompt], SamplingParams(max_new_tokens=6, logprobs=0, ignore_eos=True))[0]
    assert completion.logprobs is not None
    ids = model.engine.encode(prompt)
    score = model._scorer.score(ids, [list(completion.token_ids)])[0]
    assert score.greedy
    assert score.log_likelihood == pytest.approx(sum(entry.logprob for entry in completion.logprobs), abs=1e-3)


def test_requests_come_back_in_their_order(model: EngineLM) -> None:
    pairs = [("Tide", " in"), ("Tide", " out and in"), ("Moon", " up"), ("Tide", " in")]
    together = model.loglikelihood([request(*pair) for pair in pairs])
    alone = [model.loglikelihood([request(*pair)])[0] for pair in pairs]
    assert [a for a, _ in together] == pytest.approx([a for a, _ in alone], abs=1e-3)
    assert together[0][0] != pytest.approx(together[1][0], abs=1e-3)


def test_spaces_that_end_a_context_go_with_the_continuation(model: EngineLM) -> None:
    spaced, plain = (model.loglikelihood([request(*pair)])[0] for pair in (("Tide ", "in"), ("Tide", " in")))
    assert spaced == plain


def test_an_empty_context_is_the_beginning_of_a_text(model: EngineLM) -> None:
    found = model.loglikelihood([request("", "The tide")])[0][0]
    ids = model._tokenizer.encode("The tide", add_special_tokens=False)
    assert found == pytest.approx(model._scorer.score([model.prefix_token_id], [ids])[0].log_likelihood, abs=1e-4)
    rolled = model.loglikelihood_rolling([request("The tide")])[0]
    assert rolled == pytest.approx(found, abs=1e-4)


def test_a_text_longer_than_the_context_is_scored_whole(model: EngineLM) -> None:
    text = "The tide comes in twice a day, and goes out as often. " * 6
    ids = model._tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 128
    expected, first = 0.0, True
    for start in range(0, len(ids), 127):
        context = [model.prefix_token_id] if first else ids[start - 1 : start]
        part = ids[start : start + 127]
        if len(part) < 127 and not first:  # the last window has all the context that fits
            context = ids[len(ids) - 128 : start]
        expected += model._scorer.score(context, [part])[0].log_likelihood
        first = False
    assert model.loglikelihood_rolling([request(text)])[0] == pytest.approx(expected, abs=1e-3)


def test_a_long_context_loses_its_beginning(model: EngineLM) -> None:
    long = " ".join(WORDS * 10)
    found = model.loglikelihood([request(long, " tide"), request(long, " moon")])
    assert model.truncated == 2 and all(likelihood < 0 for likelihood, _ in found)
    assert model.generate_until([request(long, {"max_gen_toks": 4})])[0] is not None and model.truncated == 3


def test_generation_stops_as_it_is_told(model: EngineLM) -> None:
    free = model.generate_until([request("The tide", {"max_gen_toks": 12, "until": [], "do_sample": False})])[0]
    stop = free[3:5]
    stopped, short = model.generate_until(
        [request("The tide", {"max_gen_toks": 12, "until": [stop]}), request("The tide", {"max_new_tokens": 2})]
    )
    assert stopped == free[: free.index(stop)] and free.startswith(short) and short != free
    with pytest.raises(FutError, match="num_beams has no counterpart"):
        model.generate_until([request("The tide", {"num_beams": 4})])


def test_chat_templates_are_the_models(model: EngineLM) -> None:
    text = model.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert "Hi" in text and text.endswith("assistant\n")


def test_an_engine_without_a_tokenizer_is_refused(made: Path) -> None:
    engine = Engine(made / "artifact", backend="reference", device="cpu")
    with pytest.raises(FutError, match="no tokenizer"):
        EngineLM(Engine.from_backend(engine.backend))


@pytest.mark.usefixtures("offline")
def test_answers_are_those_of_the_greatest_likelihood(made: Path, model: EngineLM) -> None:
    task = local_task("arc_challenge", made / "arc.jsonl")
    answers = ask(model, task)
    expected, expected_norm, chosen = [], [], []
    for question in QUESTIONS:
        choices: list[str] = question["choices"]["text"]  # type: ignore[index]
        context = f"Question: {question['question']}\nAnswer:"
        likelihoods = [
            likelihood for likelihood, _ in model.loglikelihood([request(context, f" {c}") for c in choices])
        ]
        gold = "ABC".index(str(question["answerKey"]))
        relative = [a / len(c) for a, c in zip(likelihoods, choices, strict=True)]
        chosen.append(likelihoods.index(max(likelihoods)))
        expected.append(float(chosen[-1] == gold))
        expected_norm.append(float(relative.index(max(relative)) == gold))
    assert (answers.right, answers.right_norm) == (tuple(expected), tuple(expected_norm))
    assert answers.chosen == tuple(chosen)
    result = summarize(task, answers)
    assert result.acc.mean == sum(expected) / 8 and result.questions == 8


@pytest.mark.usefixtures("offline")
def test_accuracies_and_errors_are_lm_evals(made: Path, model: EngineLM) -> None:
    from lm_eval.evaluator import evaluate

    task = local_task("arc_challenge", made / "arc.jsonl")
    result = summarize(task, ask(model, task))
    again = local_task("arc_challenge", made / "arc.jsonl").harness_task
    theirs = evaluate(model, {"arc_challenge": again}, bootstrap_iters=100)["results"]["arc_challenge"]
    for name, estimate in (("acc", result.acc), ("acc_norm", result.acc_norm)):
        assert theirs[f"{name},none"] == pytest.approx(estimate.mean)
        assert theirs[f"{name}_stderr,none"] == pytest.approx(estimate.standard_error)


@pytest.mark.usefixtures("offline")
def test_examples_stand_before_every_question_and_are_not_asked(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[str] = []

    class Recording(EngineLM):
        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            contexts.extend(r.args[0] for r in requests)
            return super().loglikelihood(requests)

    model = Recording(Engine(made / "artifact", backend="reference", device="cpu"))
    answers = ask(model, local_task("arc_challenge", made / "arc.jsonl", few_shot=2))
    assert len(answers.right) == 6
    shots = [
        f"Question: {q['question']}\nAnswer: {q['choices']['text']['ABC'.index(str(q['answerKey']))]}"  # type: ignore[index]
        for q in QUESTIONS[:2]
    ]
    for place, question in enumerate(QUESTIONS[2:]):
        expected = "\n\n".join([*shots, f"Question: {question['question']}\nAnswer:"])
        assert contexts[3 * place : 3 * place + 3] == [expected] * 3
    with pytest.raises(FutError, match="too few questions for 8 examples"):
        local_task("arc_challenge", made / "arc.jsonl", few_shot=8)


def test_a_hub_that_is_out_of_reach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(FutError, match=r"arc_challenge: its data set could not be had .*give a local file \(--data\)"):
        hub_task("arc_challenge", few_shot=1)


@pytest.fixture
def run(made: Path, offline: None) -> Callable[..., Result]:
    def invoke(task: str, *args: str) -> Result:
        data = made / ("arc.jsonl" if task == "arc_challenge" else "hellaswag.jsonl")
        command = ["eval", "multiple-choice", str(made / "artifact"), "--task", task, "--data", str(data), *args]
        return CliRunner().invoke(main, command)

    return invoke


@pytest.mark.parametrize("protocol", ["decode", "prefill", "serve"])
def test_the_command_for_programs(run: Callable[..., Result], made: Path, protocol: str) -> None:
    options = ["--protocol", protocol, "--limit", "5", "--baseline", str(made / "checkpoint"), "--json"]
    result = run("hellaswag", *options)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["task"], figures["questions"], figures["protocol"]) == ("hellaswag", 5, protocol)
    assert 0 <= figures["acc"]["mean"] <= 1 and figures["acc_norm"]["standard_error"] >= 0
    difference = figures["acc"]["mean"] - figures["baseline_acc"]["mean"]
    assert figures["acc_difference"]["mean"] == pytest.approx(difference)
    assert ("saturated_share" in figures) == (protocol != "decode")


def test_the_command_for_readers(run: Callable[..., Result], made: Path) -> None:
    result = run("arc_challenge", "--few-shot", "1", "--few-shot-data", str(made / "arc.jsonl"))
    assert result.exit_code == 0, result.output
    assert "arc_challenge: 7 questions, 1-shot" in " ".join(result.stdout.split()) and "acc_norm" in result.stdout


def test_the_scorer_and_the_steps_of_the_engine_agree(made: Path) -> None:
    engine = Engine(made / "artifact", backend="reference", device="cpu", compute="fp32")
    runner = ReferenceRunner(engine.backend.model, "serve", engine.backend.new_scales)  # type: ignore[attr-defined]
    pairs = [request("The tide", f" {word}") for word in WORDS[:4]]
    fast, slow = (EngineLM(engine, scorer).loglikelihood(pairs) for scorer in (ReferenceScorer(runner), None))
    assert [a for a, _ in fast] == pytest.approx([a for a, _ in slow], abs=1e-3)
