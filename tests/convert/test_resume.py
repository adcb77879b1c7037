"""Conversions that are killed, interrupted or fail, and go on where they stopped."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fut_convert import convert, resume
from fut_convert.cli import main
from fut_convert.resume import SavePace
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.remains import clear_behind_renaming
from fut_runtime.artifact.writer import ArtifactWriter
from fut_runtime.errors import ArtifactError
from interrupted import RECIPES, interrupted, sealed, stopped_at
from killed_conversion import convert_and_kill

Make = Callable[..., Path]


@pytest.fixture
def save_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_SAVING_SHARE", 1e9)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_killed_conversion_goes_on_and_ends_with_the_same_bytes(
    recipe: str, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    # One recipe's kills fall into the report, too.
    checkpoint, report = tiny_checkpoint(layers=3), recipe == "rtn"
    expected = sealed(convert(str(checkpoint), tmp_path / "whole", overrides=RECIPES[recipe]).path)
    total = convert_and_kill(checkpoint, tmp_path / "counted", RECIPES[recipe], None, report=report)
    assert total is not None and sealed(tmp_path / "counted") == expected
    draw = random.Random(recipe)
    points = {1, 2, total - 2, total - 1} | {draw.randrange(3, total - 2) for _ in range(8)}
    gone_on = set()
    for point in sorted(points):
        out = tmp_path / f"killed-at-{point}"
        assert convert_and_kill(checkpoint, out, RECIPES[recipe], point, report=report) is None
        if not out.exists():
            gone_on.add(convert(str(checkpoint), out, overrides=RECIPES[recipe], report=False).resumed_layers)
        # Killed behind the renaming, the artifact is whole; what was to go after it goes with the next command.
        clear_behind_renaming(out)
        assert sealed(out) == expected, point
        assert not out.with_name(f"{out.name}.partial").exists()
    assert len(gone_on) > 2 and None in gone_on


def test_one_that_is_killed_while_it_replaces_an_artifact(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint(layers=1), tmp_path / "place" / "out"
    older = sealed(convert(str(checkpoint), tmp_path / "older", overrides=RECIPES["rtn"], report=False).path)
    recipe = RECIPES["uncalibrated"]
    expected = sealed(convert(str(checkpoint), tmp_path / "whole", overrides=recipe, report=False).path)

    def replace_and_kill(at: int | None) -> int | None:
        shutil.rmtree(out.parent, ignore_errors=True)
        shutil.copytree(tmp_path / "older", out)
        return convert_and_kill(checkpoint, out, recipe, at, overwrite=True, report=False)

    total = replace_and_kill(None)
    assert total is not None and sealed(out) == expected
    seen = set()
    # The renaming is among the last calls; what goes after it takes a call a file.
    for point in range(total - len(older) - 9, total + 1, 2):
        if replace_and_kill(point) is None:
            clear_behind_renaming(out)
            left = sorted(p.name for p in out.parent.iterdir())
            seen |= {name.rstrip("0123456789") for name in left}
            assert "out" in left or [n for n in left if n.startswith("out.replaced-")], left
            if "out" in left:
                assert sealed(out) in (older, expected)
            convert(str(checkpoint), out, overrides=recipe, report=False, overwrite=True)
        assert sealed(out) == expected and [p.name for p in out.parent.iterdir()] == ["out"]
    assert seen == {"out", "out.partial", "out.replaced-"}


def test_a_conversion_that_is_killed_again_and_again_ends_at_last(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint(layers=4), tmp_path / "out"
    expected = sealed(convert(str(checkpoint), tmp_path / "whole", overrides=RECIPES["gptq"]).path)
    total = convert_and_kill(checkpoint, tmp_path / "counted", RECIPES["gptq"], None, report=False)
    assert total is not None
    runs = 1
    # A third of all calls is more than the start and one layer take, and far less than all layers.
    while convert_and_kill(checkpoint, out, RECIPES["gptq"], total // 3, report=False) is None:
        runs += 1
        assert runs < 10
    assert runs > 2
    assert sealed(out) == expected


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_failure_keeps_the_layers_that_are_done(
    recipe: str, tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None
) -> None:
    checkpoint, out = tiny_checkpoint(layers=3), tmp_path / "out"
    expected = sealed(convert(str(checkpoint), tmp_path / "whole", overrides=RECIPES[recipe]).path)
    for layer in (1, 2):
        interrupted(checkpoint, out, RECIPES[recipe], layer)
    steps: list[tuple[int, int]] = []
    began: list[str] = []
    result = convert(
        str(checkpoint), out, overrides=RECIPES[recipe], on_resume=lambda *s: steps.append(s),
        progress=lambda done, total, what: began.append(what),
    )  # fmt: skip
    assert steps == [(2, 3)] and began[:3] == ["layer 3 of 3", "head", "sealing"]
    assert sealed(out) == expected
    log = json.loads((out / "conversion_log.json").read_text())
    assert log["resumed_layers"] == result.resumed_layers == 2
    whole = json.loads((tmp_path / "whole" / "conversion_log.json").read_text())
    assert (log["module_error"], log["gptq"]) == (whole["module_error"], whole["gptq"])
    assert whole["resumed_layers"] is None


def test_another_recipe_is_refused_and_can_begin_anew(
    tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None
) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"
    interrupted(checkpoint, out, RECIPES["rtn"], 1)
    before = sorted(tmp_path.rglob("*"))
    other = {**RECIPES["rtn"], "int4.group_size": 32}
    with pytest.raises(ArtifactError, match=r'recipe\.int4\.group_size was "auto" and is 32.*--restart'):
        convert(str(checkpoint), out, overrides=other)
    assert sorted(tmp_path.rglob("*")) == before
    assert convert(str(checkpoint), out, overrides=other, restart=True).resumed_layers is None
    assert sealed(out) == sealed(convert(str(checkpoint), tmp_path / "whole", overrides=other).path)


def test_a_checkpoint_that_was_changed_is_refused(
    tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None
) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"
    interrupted(checkpoint, out, RECIPES["rtn"], 1)
    tiny_checkpoint(seed=1)
    with pytest.raises(ArtifactError, match=r"checkpoint\.config\.json was .*checkpoint\.model\.safetensors was \["):
        convert(str(checkpoint), out, overrides=RECIPES["rtn"])


def test_another_version_is_refused(
    tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"
    interrupted(checkpoint, out, RECIPES["rtn"], 1)
    monkeypatch.setattr("fut_convert.manifest.tool_versions", lambda *_: {"torch": "1.0"})
    with pytest.raises(ArtifactError, match=r'tools\.torch was ".*" and is "1\.0"'):
        convert(str(checkpoint), out, overrides=RECIPES["rtn"])


def test_files_that_were_cut_are_refused(tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"
    interrupted(checkpoint, out, RECIPES["rtn"], 1)
    states = next((tmp_path / "out.partial" / ".fut_progress").glob("calibration.*"))
    whole = states.read_bytes()
    states.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=r"calibration\.\d+: its first \d+ bytes have SHA-256 .*--restart"):
        convert(str(checkpoint), out, overrides=RECIPES["rtn"])
    states.write_bytes(whole)
    shard = next((tmp_path / "out.partial").glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ArtifactError, match="the file was changed, start over"):
        convert(str(checkpoint), out, overrides=RECIPES["rtn"])
    convert(str(checkpoint), out, overrides=RECIPES["rtn"], restart=True)
    Artifact.open(out, verify=True)


def flip_a_bit(file: Path, byte: int) -> None:
    data = bytearray(file.read_bytes())
    data[byte] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_bit_that_flips_while_nothing_runs_is_not_sealed(
    recipe: str, tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None
) -> None:
    checkpoint, out = tiny_checkpoint(layers=3), tmp_path / "out"
    partial, record = tmp_path / "out.partial", tmp_path / "out.partial" / ".fut_progress" / "progress.json"
    expected = sealed(convert(str(checkpoint), tmp_path / "whole", overrides=RECIPES[recipe], report=False).path)
    interrupted(checkpoint, out, RECIPES[recipe], 2)
    saved = json.loads(record.read_bytes())["progress"]["hashes"]
    files = [path for path in partial.rglob("*") if path.name in saved]
    assert len(files) == len(saved) == {"uncalibrated": 1, "rtn": 2, "gptq": 3}[recipe]
    # The first byte behind a shard's header, which is written anew, and one of the last layer that is done.
    for file, byte in [(f, b) for f in files for b in ((12288, 400_000) if f.suffix == ".safetensors" else (0, -1))]:
        flip_a_bit(file, byte)
        with pytest.raises(ArtifactError, match=rf"{file}: its first \d+ bytes have SHA-256 \w+, expected .*--restart"):
            convert(str(checkpoint), out, overrides=RECIPES[recipe], report=False)
        assert not out.exists()
        flip_a_bit(file, byte)
    whole = record.read_bytes()
    flip_a_bit(record, whole.index(b'"embed_amax": ') + len('"embed_amax": '))
    assert json.loads(record.read_bytes()) != json.loads(whole)
    assert convert(str(checkpoint), out, overrides=RECIPES[recipe], report=False).resumed_layers is None
    assert sealed(out) == expected


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"format_version": 3}', b'{"format_version": 2, "serial": 3}'])
def test_a_record_that_says_nothing_is_cleared_away(
    record: bytes, tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None
) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"
    interrupted(checkpoint, out, RECIPES["uncalibrated"], 1)
    (tmp_path / "out.partial" / ".fut_progress" / "progress.json").write_bytes(record)
    assert convert(str(checkpoint), out, overrides=RECIPES["uncalibrated"]).resumed_layers is None
    sealed(out)


def test_a_failure_before_the_first_layer_leaves_nothing(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    interrupted(checkpoint, tmp_path / "out", RECIPES["gptq"], 0)
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.name]


def test_the_program_says_what_it_keeps_and_where_it_goes_on(
    tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None
) -> None:
    checkpoint, out = tiny_checkpoint(layers=3), tmp_path / "out"
    arguments = [str(checkpoint), str(out), "--no-calibration", "--scale-method", "absmax_7"]
    kept = "out.partial keeps 2 of 3 layers: the same command goes on from there"
    for error, code, message in (
        (KeyboardInterrupt(), 130, f"interrupted; {kept}"),
        (ArtifactError("the disk is full"), 1, f"{kept}\nError: the disk is full"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            stopped_at(2, patch, error)
            result = CliRunner().invoke(main, arguments)
        assert result.exit_code == code and message in result.stderr
    refused = CliRunner().invoke(main, [*arguments, "--head", "int4"])
    assert refused.exit_code == 1 and 'recipe.head was "bf16" and is "int4"' in refused.stderr
    assert "goes on" not in refused.stderr
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["resumed_layers"] == 2
    result = CliRunner().invoke(main, [*arguments, "--overwrite"])
    assert result.exit_code == 0 and "going on" not in result.stderr


def test_the_program_begins_anew_on_request(tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None) -> None:
    checkpoint, out = tiny_checkpoint(layers=2), tmp_path / "out"
    interrupted(checkpoint, out, RECIPES["uncalibrated"], 1)
    arguments = [
        str(checkpoint), str(out), "--no-calibration", "--scale-method", "absmax_7", "--max-shard-gb", "0.001"
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(1, patch, KeyboardInterrupt())
        result = CliRunner().invoke(main, arguments)
        assert "going on after 1 of 2 layers" in result.stderr
        assert "going on" not in CliRunner().invoke(main, [*arguments, "--restart"]).stderr


def test_saving_takes_a_twentieth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fut_convert.resume.time.monotonic", lambda: now[0])
    pace = SavePace()
    assert pace.due, "the first layer is saved, for nobody knows yet what that costs"
    with pace.saving():
        now[0] += 2
    now[0] += 39
    assert not pace.due
    now[0] += 1
    assert pace.due


def test_a_writer_without_inputs_neither_saves_nor_goes_on(
    tiny_checkpoint: Make, tmp_path: Path, save_every_layer: None
) -> None:
    checkpoint, out = tiny_checkpoint(), tmp_path / "out"
    manifest = Artifact.open(convert(str(checkpoint), tmp_path / "a", overrides=RECIPES["uncalibrated"]).path).manifest
    interrupted(checkpoint, out, RECIPES["uncalibrated"], 1)
    with ArtifactWriter(out, manifest) as writer:
        assert writer.resumed is None and len(writer.missing) > 20
        with pytest.raises(ValueError, match="saves nothing"):
            writer.save({})
    assert not (tmp_path / "out.partial").exists()
