"""What is given as text: recipes, tokenizers with their chat templates, and documents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import yaml

from fut_convert.calibration_documents import open_calibration_text
from fut_convert.recipe import CalibrationRecipe, load_recipe
from fut_runtime.artifact.reader import Artifact
from fut_runtime.commands.prompts import as_prompt, read_prompts
from fut_runtime.errors import FutError
from fut_runtime.evaluate.questions import read_questions
from fut_runtime.hub.source_card import carried_metadata
from fut_runtime.tokenizer import Tokenizer
from fuzzing.artifact_reader import sealed_anew
from fuzzing.mutations import FRAGMENTS, damage_bytes, damage_json
from fuzzing.reader import Files, Reader, damage_document, files_of
from repository import REPOSITORY
from synthetic_checkpoint import CheckpointShape, write_checkpoint
from tiny_artifact import write_artifact

_SHAPE = CheckpointShape(layers=1, vocab_size=300)


class RecipeReader(Reader):
    """A recipe."""

    name = "recipe"
    _YAML: tuple[str, ...] = (
        *("&a [*a]", "*a", "&a {b: *a}", "<<: *a", "<<: {a: 1}", "!!int x", "!!float x", "!!bool x", "!!timestamp x"),
        *("!!binary x", "!!python/object/apply:os.system [ls]", "!!set {a}", "!!omap [a]", "!!map [1]", "!!seq {a: 1}"),
        *("2024-99-99", "2024-01-01", "1:1:1:1:1:1", "0x" + "f" * 9000, "0b" + "1" * 40_000, "1" * 5000, ".inf"),
        *("-.inf", ".nan", "1e400", "? [a]\n: b", "? {a: b}\n: c", "{[1]: 2}", "[" * 5000, "{a: " * 5000),
        *("- " * 5000, "\t", "\0", "%YAML 9.9\n---", "---\n---", "|\n x", ">\n x", '"\\ud800"', "'", "? ? ? a"),
    )

    def make(self, folder: Path) -> Files:
        recipes = sorted((REPOSITORY / "recipes").glob("*.yaml"))
        self._documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in recipes]
        return {"recipe.yaml": recipes[0].read_bytes()}

    def damaged(self, random: Random) -> Files:
        kind = random.random()
        if kind < 0.4:  # JSON is YAML
            return {"recipe.yaml": damage_json(random, random.choice(self._documents)).encode()}
        text = yaml.safe_dump(random.choice(self._documents))
        if kind < 0.8:
            lines = text.splitlines()
            at = random.randrange(len(lines))
            piece = random.choice((*self._YAML, *FRAGMENTS))
            lines[at] = random.choice((piece, f"{lines[at].partition(':')[0]}: {piece}", f"  {lines[at]}"))
            return {"recipe.yaml": "\n".join(lines).encode()}
        return {"recipe.yaml": damage_bytes(random, text.encode())}

    def read(self, folder: Path) -> None:
        load_recipe(str(folder / "recipe.yaml"))


class TokenizerReader(Reader):
    """tokenizer.json, what is said about it, and the chat template."""

    name = "tokenizer"
    _NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    _TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}{{ eos_token }}"

    def make(self, folder: Path) -> Files:
        files = files_of(write_checkpoint(folder, _SHAPE))
        special = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
        return {
            "tokenizer.json": files["tokenizer.json"],
            "tokenizer_config.json": files["tokenizer_config.json"],
            "special_tokens_map.json": json.dumps(special).encode(),
        }

    def damaged(self, random: Random) -> Files:
        files = dict(self.whole)
        name = random.choice(self._NAMES)
        if name == "chat_template.jinja":
            files[name] = damage_bytes(random, self._TEMPLATE.encode())
        else:
            files[name] = damage_document(random, files[name])
        return files

    def read(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_directory(folder)
        ids = tokenizer.encode("Once upon a time, été 12\n")
        tokenizer.decode(ids)
        tokenizer.detokenizer().push(ids[0]) if ids else None
        _ = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_ids
        if tokenizer.chat_template is not None:
            tokenizer.encode_chat([{"role": "user", "content": "Why?"}])


class DocumentsReader(Reader):
    """Lines of JSON with texts or prompts, and what a model card says for programs."""

    name = "documents"
    _LINES: tuple[dict[str, Any], ...] = (
        {"text": "Once upon a time", "meta": {"id": 1}},
        {"text": "the end", "prompt": "Why?"},
        {"prompt": "Name a colour.", "system": "One word."},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    )
    _PROMPTS = _LINES[2:]
    _QUESTIONS = (
        {"question": "Why?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
        {"question": "Who?", "choices": {"text": ["c", "d"], "label": ["1", "2"]}, "answerKey": "2"},
    )
    _CARD: Mapping[str, Any] = {"license": "mit", "language": ["en", "de"], "tags": ["x"], "base_model": "a/b"}

    def make(self, folder: Path) -> Files:
        card = f"---\n{yaml.safe_dump(dict(self._CARD))}---\n# Model\n"
        self._tokenizer = Tokenizer.from_directory(write_checkpoint(folder / "model", _SHAPE))
        self._artifact = files_of(write_artifact(folder / "artifact", side_files={"SOURCE_README.md": card.encode()}))
        self._lines = {"texts.jsonl": self._LINES[:2], "prompts.jsonl": self._PROMPTS, "arc.jsonl": self._QUESTIONS}
        texts = {name: "\n".join(map(json.dumps, lines)).encode() for name, lines in self._lines.items()}
        return {**texts, "SOURCE_README.md": card.encode()}

    def damaged(self, random: Random) -> Files:
        files = dict(self.whole)
        name = random.choice(list(files))
        if name.endswith(".md"):
            text = damage_json(random, dict(self._CARD)) if random.random() < 0.5 else yaml.safe_dump(dict(self._CARD))
            files[name] = f"---\n{text}\n---\n".encode("utf-8", "surrogatepass")
        else:
            lines = [
                damage_json(random, line) if random.random() < 0.4 else json.dumps(line) for line in self._lines[name]
            ]
            files[name] = "\n".join(lines).encode("utf-8", "surrogatepass")
        if random.random() < 0.2:
            files[name] = damage_bytes(random, files[name])
        return files

    def read(self, folder: Path) -> None:
        sealed = {**self._artifact, "SOURCE_README.md": (folder / "SOURCE_README.md").read_bytes()}
        place = self.write_into(folder / "artifact", sealed_anew(sealed, "SOURCE_README.md"))
        carried_metadata(Artifact.open(place))
        errors: list[FutError] = []
        for read in (self._texts, self._prompts, self._questions):
            try:
                read(folder)
            except FutError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @staticmethod
    def _texts(folder: Path) -> None:
        open_calibration_text(CalibrationRecipe(text=str(folder / "texts.jsonl"))).read(1000)

    def _prompts(self, folder: Path) -> None:
        for given in read_prompts((), folder / "prompts.jsonl"):
            prompt = as_prompt(given, None, raw=False, tokenizer=self._tokenizer)
            if isinstance(prompt, list):
                self._tokenizer.encode_chat(prompt)

    @staticmethod
    def _questions(folder: Path) -> None:
        read_questions("arc_challenge", folder / "arc.jsonl")
