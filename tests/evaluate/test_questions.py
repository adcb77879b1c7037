"""Files of multiple-choice questions: lm-eval's wordings, and every mistake with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fut_runtime.errors import FutError
from fut_runtime.evaluate.questions import Question, read_questions

ARC = {"question": "What melts?", "choices": {"text": ["Ice", "Iron"], "label": ["A", "B"]}, "answerKey": "A"}
HELLASWAG = {
    "activity_label": "Cooking",
    "ctx_a": "A man cuts bread. [header] Bread",
    "ctx_b": "the man",
    "endings": ["eats it. [step] Then  he rests.", "flies off. [title] Wings"],
    "label": "1",
}


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def test_arc(tmp_path: Path) -> None:
    numbered = {**ARC, "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, "answerKey": "3"}
    found = read_questions("arc_challenge", write(tmp_path / "arc", ARC, "", numbered))
    assert found[0] == Question("Question: What melts?\nAnswer:", ("Ice", "Iron"), 0)
    assert found[1].gold == 2


def test_hellaswag_in_both_forms(tmp_path: Path) -> None:
    short = {"ind": 0, "ctx": "Cooking: A man cuts bread. he", "endings": ["a", "b"], "label": 1}
    found = read_questions("hellaswag", write(tmp_path / "hellaswag", HELLASWAG, short))
    assert found[0].query == "Cooking: A man cuts bread. Bread The man"
    assert found[0].choices == ("eats it. Then he rests.", "flies off.. Wings") and found[0].gold == 1
    assert found[1] == Question("Cooking: A man cuts bread. he", ("a", "b"), 1)


def test_hellaswag_is_worded_as_lm_eval_words_it(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'futransformer[eval]'")
    import datasets
    from lm_eval.tasks.hellaswag.utils import process_docs

    records = [HELLASWAG, {**HELLASWAG, "ctx_a": "  [title] Go [x] far.", "ctx_b": "", "label": "0"}]
    expected = process_docs(datasets.Dataset.from_list(records))
    found = read_questions("hellaswag", write(tmp_path / "hellaswag", *records))
    for question, doc in zip(found, expected, strict=True):
        assert (question.query, list(question.choices), question.gold) == (doc["query"], doc["choices"], doc["gold"])


@pytest.mark.parametrize(
    ("task", "record", "message"),
    [
        ("arc_challenge", "{", "line 2: not a line of arc_challenge"),
        ("arc_challenge", "[1]", "line 2: not a line"),
        ("arc_challenge", "[" * 100_000, "line 2: not a line"),
        ("arc_challenge", {"question": "?"}, "line 2: no 'choices'"),
        ("arc_challenge", {**ARC, "answerKey": "E"}, r"answerKey 'E' is not one of its labels \['A', 'B'\]"),
        ("arc_challenge", {**ARC, "choices": {"text": ["x"], "label": ["A", "B"]}}, "1 texts and 2 labels"),
        ("arc_challenge", {**ARC, "choices": {"text": ["x"], "label": ["A"]}}, "two answers or more"),
        ("arc_challenge", {**ARC, "choices": {"text": ["x", " "], "label": ["A", "B"]}}, "none of them empty"),
        ("hellaswag", {"ctx": "x", "endings": ["a", "b"], "label": 2}, "label 2 is not one of its 2 endings"),
        ("hellaswag", ARC, "no 'endings'"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, task: str, record: Any, message: str) -> None:
    good = ARC if task == "arc_challenge" else HELLASWAG
    with pytest.raises(FutError, match=message):
        read_questions(task, write(tmp_path / "file", good, record))


def test_files_without_questions(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(FutError, match="holds no questions"):
        read_questions("hellaswag", tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(FutError, match="cannot be read as UTF-8"):
        read_questions("hellaswag", tmp_path / "binary")
