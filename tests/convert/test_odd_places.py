"""Where people put things: names in any script or in none, links, places inside each other, places without rights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fut_convert import convert, plan_conversion, resume
from fut_convert.cli import main
from fut_convert.errors import CheckpointError, PreflightError
from fut_convert.sources import open_source
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.errors import ArtifactError
from interrupted import RECIPES, interrupted, sealed
from powerless import powerless

Make = Callable[..., Path]
QUICK = RECIPES["uncalibrated"]


def program(*arguments: str | Path) -> Result:
    quick = ["--no-calibration", "--scale-method", "absmax_7"]
    return CliRunner().invoke(main, [*map(str, arguments), *quick])


@pytest.mark.parametrize("name", ["two words", "ünï cödé | 模型", "-", "a\nb", os.fsdecode(b"\xff\xfe")], ids=ascii)
def test_names_of_any_kind(name: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    model = tiny_checkpoint("plain", layers=1).rename(tmp_path / name)
    result = program(f"{model}/", f"{tmp_path}/out {name}/", "--json")
    assert result.exit_code == 0, result.output
    out = tmp_path / f"out {name}"
    assert verify_artifact(out).ok and json.loads(result.stdout)["path"] == str(out)
    source = json.loads((out / "fut_config.json").read_bytes())["source"]
    assert source == {"kind": "directory", "name": os.fsencode(name).decode(errors="replace")}
    assert (out / "report.md").is_file()


@pytest.mark.parametrize("out", [".", "", "/", "..", "model/.."])
def test_an_output_without_a_name(out: str, tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_checkpoint("model", layers=1)
    monkeypatch.chdir(model.parent)
    for more in ((), ("--dry-run",)):
        result = program("model", out, *more)
        assert result.exit_code == 1 and "has no name of its own; give the directory to create" in result.stderr


def test_an_output_inside_the_checkpoint(tiny_checkpoint: Make) -> None:
    model = tiny_checkpoint(layers=1)
    first = sealed(convert(str(model), model / "out", overrides=QUICK, report=False).path)
    again = sealed(convert(str(model), model / "again", overrides=QUICK, report=False).path)
    assert first == again and not any("out" in name for name in again)


def test_the_checkpoint_is_no_output(tiny_checkpoint: Make) -> None:
    model = tiny_checkpoint(layers=1)
    with pytest.raises(PreflightError, match=r"holds no fut_config\.json and so was not made by this program"):
        convert(str(model), model, overrides=QUICK, overwrite=True)
    with open_source(str(model)) as source:
        assert source.check() == []


def test_links_above_the_output_are_followed_and_it_is_none_itself(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_SAVING_SHARE", 1e9)
    model, place = tiny_checkpoint(layers=3), tmp_path / "place"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(PreflightError, match="link: is a link; remove it, or name the directory it points to"):
        convert(str(model), tmp_path / "link", overrides=QUICK)
    # The same place by another name: the interrupted conversion is found, and goes on.
    interrupted(str(model), tmp_path / "link" / "out", QUICK, 2)
    result = convert(str(model), place / "out", overrides=QUICK, report=False)
    assert result.resumed_layers == 2 and result.path == place / "out"


def test_a_model_that_is_neither_file_nor_directory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    for model in (tmp_path / "model.gguf", Path("/dev/zero")):
        result = program(model, tmp_path / "out")
        assert result.exit_code == 1 and "is neither a file nor a directory, so no checkpoint" in result.stderr


def test_the_root_of_the_file_system(tmp_path: Path) -> None:
    assert "Error: /: no config.json" in program("/", tmp_path / "out").stderr


@pytest.mark.parametrize("name", ["x" * 250, "x" * 300, "x" * 300 + "/out"])
def test_a_name_too_long_for_the_file_system(name: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    result = program(tiny_checkpoint(layers=1), tmp_path / name)
    assert result.exit_code == 1 and "File name too long" in result.stderr and "Traceback" not in result.output


def test_a_place_that_may_not_be_written_to_is_found_in_the_plan(tiny_checkpoint: Make, tmp_path: Path) -> None:
    model, place = tiny_checkpoint(layers=1), tmp_path / "place"
    place.mkdir(mode=0o555)
    with powerless():
        plan = plan_conversion(str(model), place / "deep" / "out", overrides=QUICK)
        assert len(plan.errors) == 1 and f"nothing can be written to {place}" in plan.errors[0]
        with pytest.raises(PreflightError, match="nothing can be written to"):
            convert(str(model), place / "out", overrides=QUICK)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "LICENSE", "."])
def test_what_may_not_be_read_is_named_before_any_work(name: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    model = tiny_checkpoint(layers=1)
    (model / "LICENSE").touch()
    (model / name).chmod(0)
    with powerless():
        result = program(model, tmp_path / "out")
    assert result.exit_code == 1 and "Permission denied" in result.stderr
    assert (model.name if name == "." else name) in result.stderr
    assert not (tmp_path / "out.partial").exists()


def test_no_name_at_all_and_the_address_of_a_page() -> None:
    # A shell's variable that is not set must not convert what happens to lie in the current directory.
    with pytest.raises(CheckpointError, match="the name of the model is empty"):
        open_source("")
    for address in ("https://huggingface.co/some-one/some.model", "http://localhost:80/some-one/some.model/tree/main"):
        with pytest.raises(
            CheckpointError, match=r"not a Hub id \(owner/name\); give its id alone: some-one/some\.model$"
        ):
            open_source(address)


def test_what_lies_where_the_output_is_made(tiny_checkpoint: Make, tmp_path: Path) -> None:
    model = tiny_checkpoint(layers=1)
    (tmp_path / "empty.partial").mkdir()
    assert verify_artifact(convert(str(model), tmp_path / "empty", overrides=QUICK, report=False).path).ok
    (tmp_path / "theirs.partial").mkdir()
    (tmp_path / "theirs.partial" / "notes.txt").touch()
    with pytest.raises(ArtifactError, match=r"was not made by this program .* and will not be cleared"):
        convert(str(model), tmp_path / "theirs", overrides=QUICK)
    (tmp_path / "file.partial").touch()
    with pytest.raises(ArtifactError, match=r"file\.partial: is no directory, .* remove it"):
        convert(str(model), tmp_path / "file", overrides=QUICK)
    assert (tmp_path / "theirs.partial" / "notes.txt").exists() and (tmp_path / "file.partial").exists()
