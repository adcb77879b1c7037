"""A disk that fills up at any write, a source that goes away at any read: a clear error, and the next run goes on."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from failing_disk import full_disk, lost_source
from fut_convert import convert, plan_conversion, resume
from fut_convert.cli import main
from fut_convert.errors import ReadError, ReportError
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.errors import ArtifactError, FutError
from interrupted import RECIPES, interrupted, sealed

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def save_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_SAVING_SHARE", 1e9)


#: What reading from a disk, a network's disk and a folder says that is gone.
_GONE = (errno.EIO, errno.ESTALE, errno.ENOENT)


def points(total: int, seed: str, count: int) -> list[int]:
    """The first calls, the last, and one of each of `count` stretches between."""
    assert total > 30
    draw = random.Random(seed)
    between = [4 + int((total - 10) * (i + draw.random()) / count) for i in range(count)]
    # A first conversion opens a few files more, of the libraries': the very last calls may be none of the others'.
    return sorted({1, 2, 3, *between, total - 6, total - 4})


def check_no_artifact(out: Path) -> None:
    """OUT is not there, and what is left beside it passes for an artifact only with every byte of one."""
    assert not out.exists()
    partial = out.with_name(f"{out.name}.partial")
    with contextlib.suppress(ArtifactError):
        Artifact.open(partial)
        verified = verify_artifact(partial)
        assert verified.ok, verified.findings


#: The recipe whose failures fall into the report, too.
_REPORTED = "rtn"


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_disk_that_fills_up_at_any_write(recipe: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, report = tiny_checkpoint(layers=2), recipe == _REPORTED
    with full_disk(None) as calls:
        expected = sealed(convert(str(checkpoint), tmp_path / "whole", overrides=RECIPES[recipe], report=report).path)
    gone_on = set()
    for point in points(calls[0], recipe, 6):
        out = tmp_path / f"full-at-{point}"
        with pytest.raises(FutError, match="the disk is full") as caught, full_disk(point):
            convert(str(checkpoint), out, overrides=RECIPES[recipe], report=report)
        if isinstance(caught.value, ReportError):
            assert "is whole" in str(caught.value)
        elif not out.exists():
            assert "Nothing that could be taken for a whole artifact was left" in str(caught.value)
            check_no_artifact(out)
            gone_on.add(convert(str(checkpoint), out, overrides=RECIPES[recipe]).resumed_layers)
        assert sealed(out) == expected, point
    assert len(gone_on) > 1 and None in gone_on


def test_a_disk_that_was_full_needs_room_for_the_rest_only(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = tiny_checkpoint(layers=4), tmp_path / "out"
    interrupted(checkpoint, out, RECIPES["rtn"], 3)
    plan = plan_conversion(str(checkpoint), out, overrides=RECIPES["rtn"])
    needed = plan.output_bytes + plan.scratch_bytes

    def usage(_: Path) -> object:
        return type("Usage", (), {"free": needed // 2})

    monkeypatch.setattr("fut_convert.plan.shutil.disk_usage", usage)
    assert not plan_conversion(str(checkpoint), out, overrides=RECIPES["rtn"]).errors
    (error,) = plan_conversion(str(checkpoint), tmp_path / "other", overrides=RECIPES["rtn"]).errors
    assert "are free there" in error


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_source_that_goes_away_at_any_read(recipe: str, tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, report = tiny_checkpoint("source/model", layers=2, shards=2), recipe == _REPORTED
    with lost_source(checkpoint, None) as calls:
        expected = sealed(convert(str(checkpoint), tmp_path / "whole", overrides=RECIPES[recipe], report=report).path)
    gone_on = set()
    for point, code in zip(points(calls[0], recipe, 7), itertools.cycle(_GONE), strict=False):
        out = tmp_path / f"lost-at-{point}"
        with lost_source(checkpoint, point, code), pytest.raises(FutError) as caught:
            convert(str(checkpoint), out, overrides=RECIPES[recipe], report=report)
        if isinstance(caught.value, ReportError):
            assert "is whole" in str(caught.value)
        else:
            check_no_artifact(out)
            gone_on.add(convert(str(checkpoint), out, overrides=RECIPES[recipe]).resumed_layers)
        assert sealed(out) == expected, point
    assert len(gone_on) > 1


def test_a_file_that_is_cut_while_it_is_read(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint(layers=3), tmp_path / "out"
    expected = sealed(convert(str(checkpoint), tmp_path / "whole", overrides=RECIPES["gptq"], report=False).path)
    weights = checkpoint / "model.safetensors"
    whole, times = weights.read_bytes(), weights.stat()

    def cut(done: int, _: int, __: str) -> None:
        if done == 2:
            with weights.open("r+b") as file:
                file.truncate(5000)

    with pytest.raises(ReadError, match=r"model\.safetensors: ends inside .*, \d+ bytes early"):
        convert(str(checkpoint), out, overrides=RECIPES["gptq"], progress=cut)
    check_no_artifact(out)
    with pytest.raises(FutError, match="truncated"):
        convert(str(checkpoint), out, overrides=RECIPES["gptq"])
    weights.write_bytes(whole)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert convert(str(checkpoint), out, overrides=RECIPES["gptq"], report=False).resumed_layers == 1
    assert sealed(out) == expected


def test_the_program_names_the_file_and_what_is_kept(tiny_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint, out = tiny_checkpoint("source/model", layers=3), tmp_path / "out"
    arguments = [str(checkpoint), str(out), "--no-calibration", "--scale-method", "absmax_7"]
    with lost_source(checkpoint, None) as calls:
        assert CliRunner().invoke(main, [*arguments[:1], str(tmp_path / "whole"), *arguments[2:]]).exit_code == 0
    with lost_source(checkpoint, calls[0] - 20):
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert re.search(r"out\.partial keeps [12] of 3 layers: the same command goes on from there", result.stderr)
    assert "model.safetensors: cannot be read (Input/output error); see that its disk or" in result.stderr
    assert re.search(r"going on after [12] of 3 layers", CliRunner().invoke(main, arguments).stderr)
    assert sealed(out) == sealed(tmp_path / "whole")
