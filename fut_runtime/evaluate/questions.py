"""Multiple-choice questions from JSON-lines files, in the wordings of lm-eval's tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fut_runtime.errors import FutError


@dataclass(frozen=True)
class Question:
    """What stands before the answer, the answers, and the index of the right one."""

    query: str
    choices: tuple[str, ...]
    gold: int

    def to_dict(self) -> dict[str, Any]:
        """As lm-eval wants its documents."""
        return {**asdict(self), "choices": list(self.choices)}


def arc_question(record: dict[str, Any]) -> Question:
    """A line of ARC: `question`, `choices` with `text` and `label`, and `answerKey`; worded as `arc_challenge`."""
    texts, labels = record["choices"]["text"], record["choices"]["label"]
    if len(texts) != len(labels):
        raise ValueError(f"{len(texts)} texts and {len(labels)} labels")
    if record["answerKey"] not in labels:
        raise ValueError(f"answerKey {record['answerKey']!r} is not one of its labels {labels}")
    return Question(f"Question: {record['question']}\nAnswer:", tuple(texts), labels.index(record["answerKey"]))


def hellaswag_question(record: dict[str, Any]) -> Question:
    """A line of HellaSwag, worded as `hellaswag`: the original's `activity_label`, `ctx_a`, `ctx_b`, `endings` and
    `label`, or a preprocessed `ctx` with the first three in one, which is taken as it is.
    """
    endings, gold = record["endings"], int(record["label"])
    if not 0 <= gold < len(endings):
        raise ValueError(f"label {gold} is not one of its {len(endings)} endings")
    if "ctx_b" in record:
        context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
        return Question(_without_markup(context), tuple(map(_without_markup, endings)), gold)
    return Question(record["ctx"], tuple(endings), gold)


#: Task -> how a line of its file becomes a question.
TASKS: dict[str, Callable[[dict[str, Any]], Question]] = {
    "arc_challenge": arc_question,
    "hellaswag": hellaswag_question,
}


def read_questions(task: str, file: Path) -> list[Question]:
    """Questions of a JSON-lines file.

    Raises:
        FutError: the file cannot be read, holds none, or a line is not a question of this task; names the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FutError(f"{file}: cannot be read as UTF-8 text ({error})") from error
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = TASKS[task](json.loads(line))
        except KeyError as error:
            raise FutError(f"{file}, line {number}: no {error.args[0]!r}, which a line of {task} has") from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise FutError(f"{file}, line {number}: not a line of {task} ({error})") from error
        texts = (question.query, *question.choices)
        if len(question.choices) < 2 or not all(isinstance(text, str) and text.strip() for text in texts):
            raise FutError(f"{file}, line {number}: expected a question and two answers or more, none of them empty")
        questions.append(question)
    if not questions:
        raise FutError(f"{file}: holds no questions")
    return questions


def _without_markup(text: str) -> str:
    """As lm-eval's `hellaswag` does: WikiHow's bracketed headings are artifacts."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
