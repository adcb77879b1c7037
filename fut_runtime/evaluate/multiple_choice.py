"""Multiple choice through lm-eval, from local files or the Hub, and the paired difference from a baseline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fut_runtime.errors import FutError, UnsupportedError
from fut_runtime.evaluate.perplexity import Estimate
from fut_runtime.evaluate.questions import Question, read_questions

if TYPE_CHECKING:
    from fut_runtime.evaluate.harness import EngineLM

#: Seed of the examples that lm-eval draws where a task of the Hub is used; its own default.
_FEW_SHOT_SEED = 1234


@dataclass(frozen=True)
class Answers:
    """What a model answered: for each question whether it was right, and which answer it chose.

    Attributes:
        right: 1.0 where the answer of the greatest log-likelihood is right (lm-eval's `acc`).
        right_norm: likewise with log-likelihoods divided by the length of the answer in characters (`acc_norm`).
        chosen: index of the answer of the greatest log-likelihood.
    """

    right: tuple[float, ...]
    right_norm: tuple[float, ...]
    chosen: tuple[int, ...]


@dataclass(frozen=True)
class MultipleChoiceResult:
    """Accuracy on `questions` questions; standard errors are taken over questions.

    Attributes:
        few_shot: examples before each question.
        acc, acc_norm: see `Answers`.
        acc_difference, acc_norm_difference: ours minus the baseline's, paired by question.
        same_choice: share of questions where both chose the same answer.
    """

    task: str
    questions: int
    few_shot: int
    acc: Estimate
    acc_norm: Estimate
    baseline_acc: Estimate | None = None
    baseline_acc_norm: Estimate | None = None
    acc_difference: Estimate | None = None
    acc_norm_difference: Estimate | None = None
    same_choice: Estimate | None = None

    def to_dict(self) -> dict[str, object]:
        """JSON-ready form."""
        return asdict(self)


@dataclass(frozen=True)
class Task:
    """A task ready to be asked: lm-eval's object, and what it will ask."""

    name: str
    few_shot: int
    limit: int | None
    harness_task: Any


def require_harness() -> None:
    """Raise UnsupportedError, with what to do, unless lm-eval is installed."""
    if find_spec("lm_eval") is None:
        raise UnsupportedError("multiple choice needs lm-eval: pip install 'futransformer[eval]'")
    # It warns of settings that do not concern these tasks.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def local_task(task: str, data: Path, *, few_shot: int = 0, few_shot_data: Path | None = None) -> Task:
    """A task from JSON-lines files; nothing is fetched.

    Args:
        few_shot: examples before each question, the same for all: the first of `few_shot_data`, or without that the
            first of `data`, which are then not asked.

    Raises:
        FutError: a file cannot be read, or holds too few questions.
    """
    questions = read_questions(task, data)
    if few_shot_data is None:
        examples, questions = questions[:few_shot], questions[few_shot:]
    else:
        examples = read_questions(task, few_shot_data)[:few_shot]
        questions = [question for question in questions if question not in examples]
    if len(examples) < few_shot or not questions:
        raise FutError(f"{few_shot_data or data}: too few questions for {few_shot} examples and at least one to ask")
    return Task(task, few_shot, None, _harness_task(task, questions, examples))


def hub_task(task: str, *, few_shot: int = 0) -> Task:
    """lm-eval's own task, whose data set comes from the Hub.

    Raises:
        FutError: the data set cannot be had.
    """
    from lm_eval.tasks import TaskManager

    try:
        found = TaskManager().load([task])["tasks"][task]
    except (OSError, RuntimeError, ValueError) as error:
        raise FutError(
            f"{task}: its data set could not be had from the Hub ({type(error).__name__}: {error}); give a local file "
            "(--data)"
        ) from error
    found.set_config(key="num_fewshot", value=few_shot)
    found.set_fewshot_seed(seed=_FEW_SHOT_SEED)
    return Task(task, few_shot, None, found)


def _harness_task(name: str, questions: Sequence[Question], examples: Sequence[Question]) -> Any:
    import datasets
    from lm_eval.api.task import ConfigurableTask

    class LocalTask(ConfigurableTask):  # type: ignore[misc]
        """Questions that are in memory already."""

        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = {"test": datasets.Dataset.from_list([question.to_dict() for question in questions])}

    return LocalTask(
        config={
            "task": name,
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "query",
            "doc_to_target": "gold",
            "doc_to_choice": "choices",
            "num_fewshot": len(examples),
            "fewshot_config": {"sampler": "first_n", "samples": [example.to_dict() for example in examples]},
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
            ],
        }
    )


def ask(model: EngineLM, task: Task) -> Answers:
    """Have a model answer every question of a task, the first `task.limit` of them."""
    from lm_eval.evaluator import evaluate

    found = evaluate(model, {task.name: task.harness_task}, limit=task.limit, bootstrap_iters=0)
    samples = sorted(found["samples"][task.name], key=lambda sample: int(sample["doc_id"]))
    return Answers(
        right=tuple(float(sample["acc"]) for sample in samples),
        right_norm=tuple(float(sample["acc_norm"]) for sample in samples),
        chosen=tuple(_chosen([float(likelihood) for likelihood, _ in sample["filtered_resps"]]) for sample in samples),
    )


def _chosen(likelihoods: list[float]) -> int:
    return likelihoods.index(max(likelihoods))


def summarize(task: Task, ours: Answers, baseline: Answers | None = None) -> MultipleChoiceResult:
    """Accuracies of one model, or of two that answered the same questions."""
    right, right_norm = (torch.tensor(x, dtype=torch.float64) for x in (ours.right, ours.right_norm))
    result = MultipleChoiceResult(
        task.name, len(right), task.few_shot, acc=Estimate.of(right), acc_norm=Estimate.of(right_norm)
    )
    if baseline is None:
        return result
    base, base_norm = (torch.tensor(x, dtype=torch.float64) for x in (baseline.right, baseline.right_norm))
    return MultipleChoiceResult(
        task.name,
        len(right),
        task.few_shot,
        acc=result.acc,
        acc_norm=result.acc_norm,
        baseline_acc=Estimate.of(base),
        baseline_acc_norm=Estimate.of(base_norm),
        acc_difference=Estimate.of(right - base),
        acc_norm_difference=Estimate.of(right_norm - base_norm),
        same_choice=Estimate.of(torch.tensor([a == b for a, b in zip(ours.chosen, baseline.chosen, strict=True)])),
    )
