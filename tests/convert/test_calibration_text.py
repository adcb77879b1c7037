"""The calibration text as windows of token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from fut_convert import calibration_text
from fut_convert.calibration_text import CalibrationWindows, calibration_windows
from fut_convert.errors import ConvertError
from fut_convert.recipe import CalibrationRecipe
from fut_convert.sources import open_source
from synthetic_checkpoint import BOS, EOS, SPECIAL_TOKENS, tokenizer_json

Make = Callable[..., Path]
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 12


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


def windows_of(checkpoint: Path, text: Path | None, windows: int = 3, tokens: int = 20) -> CalibrationWindows:
    recipe = CalibrationRecipe(windows=windows, window_tokens=tokens, **({} if text is None else {"text": str(text)}))
    with open_source(str(checkpoint)) as source:
        return calibration_windows(source, recipe)


def plain_ids(checkpoint: Path, text: str = TEXT) -> list[int]:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.no_truncation()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def change_tokenizer(checkpoint: Path, change: Callable[[Tokenizer], None]) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(checkpoint / "tokenizer.json"))


def change_config(checkpoint: Path, **values: Any) -> None:
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def add_bos_and_eos(tokenizer: Tokenizer) -> None:
    bos, eos = SPECIAL_TOKENS[BOS], SPECIAL_TOKENS[EOS]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(bos, BOS), (eos, EOS)]
    )  # fmt: skip


def test_windows_are_packed_without_gaps(tiny_checkpoint: Make, text: Path) -> None:
    checkpoint = tiny_checkpoint()
    windows = windows_of(checkpoint, text)
    assert windows.ids.shape == (3, 20) and windows.tokens == 60
    assert windows.ids.flatten().tolist() == plain_ids(checkpoint)[:60]


def test_the_record_identifies_the_text_without_its_path(tiny_checkpoint: Make, text: Path) -> None:
    record = windows_of(tiny_checkpoint(), text).record
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert record == {"text": "words.txt", "sha256": digest, "windows": 3, "window_tokens": 20}


def test_the_builtin_text_is_the_default(tiny_checkpoint: Make, calibration_text: Path) -> None:
    windows = windows_of(tiny_checkpoint(), None)
    assert windows.record["text"] == "builtin"
    assert windows.record["sha256"] == hashlib.sha256(calibration_text.read_bytes()).hexdigest()


def test_a_short_text_gives_fewer_windows_and_a_shorter_one(tiny_checkpoint: Make, text: Path) -> None:
    checkpoint = tiny_checkpoint()
    count = len(plain_ids(checkpoint))
    assert windows_of(checkpoint, text, windows=100).ids.shape == (count // 20, 20)
    assert windows_of(checkpoint, text, tokens=10_000).record["window_tokens"] == count


def test_windows_are_no_longer_than_the_models_positions(tiny_checkpoint: Make, text: Path) -> None:
    windows = windows_of(tiny_checkpoint(max_positions=16), text, windows=4)
    assert windows.ids.shape == (4, 16) and windows.record["window_tokens"] == 16


@pytest.mark.parametrize(
    ("config", "processor", "expected"),
    [
        ({"add_bos_token": False}, False, []),
        ({"add_bos_token": True}, False, [BOS]),
        ({"add_bos_token": None}, True, [BOS]),
        ({"add_bos_token": False}, True, []),
    ],
)
def test_the_text_begins_as_prompts_do(
    config: dict[str, Any], processor: bool, expected: list[int], tiny_checkpoint: Make, text: Path
) -> None:
    checkpoint = tiny_checkpoint()
    if processor:
        change_tokenizer(checkpoint, add_bos_and_eos)
    change_config(checkpoint, **config)
    ids = windows_of(checkpoint, text, windows=1000).ids.flatten().tolist()
    assert ids[:10] == (expected + plain_ids(checkpoint))[:10]
    assert EOS not in ids


def test_a_tokenizer_saved_while_truncating_reads_the_whole_text(tiny_checkpoint: Make, text: Path) -> None:
    checkpoint = tiny_checkpoint()
    change_tokenizer(checkpoint, lambda t: (t.enable_truncation(32), t.enable_padding())[0])
    windows = windows_of(checkpoint, text)
    assert windows.ids.flatten().tolist() == plain_ids(checkpoint)[:60]


def test_only_what_is_needed_is_tokenized_and_equals_the_whole(
    tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint()
    encode, lengths = calibration_text.Tokenizer.encode, []

    def counting(self: Any, text: str) -> list[int]:
        lengths.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(calibration_text.Tokenizer, "encode", counting)
    windows = windows_of(checkpoint, None, windows=5, tokens=100)
    builtin = (Path(calibration_text.__file__).parent / "data" / "calibration.txt").read_text(encoding="utf-8")
    assert sum(lengths) < len(builtin) / 50
    assert windows.ids.flatten().tolist() == plain_ids(checkpoint, builtin[:20_000])[:500]


def test_tokens_much_longer_than_usual_are_no_obstacle() -> None:
    raw = Tokenizer.from_str(tokenizer_json(384))
    raw.add_tokens(["=" * 90])
    text = ("=" * 90 + "word") * 4000
    whole = raw.encode(text).ids
    for wanted in (1, 200, 3000, len(whole), 10**6):
        assert calibration_text.first_tokens(calibration_text.Tokenizer(raw), lambda n: text, wanted) == whole[:wanted]


def test_texts_that_cannot_be_used_are_refused(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    path = tmp_path / "text.txt"
    for content, message in ((b"", "has 0 tokens; give a longer one"), (b"\xff\xfe", "text.txt: not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(ConvertError, match=message):
            windows_of(checkpoint, path)
    with pytest.raises(ConvertError, match=r"nowhere\.txt: No such file"):
        windows_of(checkpoint, tmp_path / "nowhere.txt")
    with pytest.raises(ConvertError, match="Is a directory"):
        windows_of(checkpoint, tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tiny_checkpoint: Make, text: Path) -> None:
    checkpoint = tiny_checkpoint()
    (checkpoint / "tokenizer.json").write_text(tokenizer_json(600), encoding="utf-8")
    with pytest.raises(ConvertError, match=r"gives id \d+, but the embedding has 384 rows: .* do not belong together"):
        windows_of(checkpoint, text)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json.*--no-calibration"),
        ("tokenizer.json", "{}", "tokenizer.json: cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not a JSON object"),
        ("tokenizer_config.json", "3", "tokenizer_config.json: not a JSON object"),
    ],
)
def test_tokenizers_that_cannot_be_read_are_refused(
    name: str, content: str | None, message: str, tiny_checkpoint: Make, text: Path
) -> None:
    checkpoint = tiny_checkpoint()
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_text(content)
    with pytest.raises(ConvertError, match=message):
        windows_of(checkpoint, text)


def test_a_broken_chat_template_does_not_matter(tiny_checkpoint: Make, text: Path) -> None:
    checkpoint = tiny_checkpoint()
    change_config(checkpoint, chat_template={"not": "a template"})
    assert windows_of(checkpoint, text).tokens == 60
