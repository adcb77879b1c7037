"""One conversion an output directory: the second is refused at once, and a dead one's lock is in nobody's way."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fut_convert import convert, plan_conversion
from fut_convert.cli import main
from fut_runtime.artifact.reader import Artifact
from fut_runtime.errors import ArtifactError
from interrupted import RECIPES, sealed

Make = Callable[..., Path]
RECIPE = RECIPES["uncalibrated"]


def _convert_and_stop(checkpoint: str, out: str, sender: Any) -> None:
    """A conversion that stands still in the middle, for as long as it is let live."""

    def stop(done: int, _: int, __: str) -> None:
        if done == 2:
            sender.send(os.getpid())
            signal.pause()

    convert(checkpoint, out, overrides=RECIPE, progress=stop)


@pytest.fixture
def running(tiny_checkpoint: Make, tmp_path: Path) -> Iterator[tuple[Path, Path, BaseProcess]]:
    checkpoint, out = tiny_checkpoint(layers=3), tmp_path / "out"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fut_convert.pipeline"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_convert_and_stop, args=(str(checkpoint), str(out), sender))
    process.start()
    assert receiver.poll(120) and receiver.recv() == process.pid
    yield checkpoint, out, process
    process.kill()
    process.join()


def test_the_second_is_refused_and_the_first_goes_on(running: tuple[Path, Path, BaseProcess]) -> None:
    checkpoint, out, process = running
    before = sorted(out.parent.rglob("*"))
    said = rf"out: is being written by another process \(pid {process.pid}\); wait for it, stop it, or choose another"
    for call in (convert, plan_conversion):
        with pytest.raises(ArtifactError, match=said):
            call(str(checkpoint), out, overrides=RECIPE)
    # Nothing was fetched or read for it.
    with pytest.raises(ArtifactError, match=said):
        convert("no/such-model", out)
    for option in ("--restart", "--overwrite"):
        result = CliRunner().invoke(main, [str(checkpoint), str(out), "--no-calibration", option])
        assert result.exit_code == 1 and re.search(said, result.stderr) and "goes on from there" not in result.stderr
    assert sorted(out.parent.rglob("*")) == before and process.is_alive()


def test_a_dead_ones_lock_is_in_nobodys_way(running: tuple[Path, Path, BaseProcess], tmp_path: Path) -> None:
    checkpoint, out, process = running
    process.kill()
    process.join()
    lock = out.with_name("out.partial") / ".fut_lock"
    assert lock.read_text() == f"pid {process.pid}"
    convert(str(checkpoint), out, overrides=RECIPE)
    assert sealed(out) == sealed(convert(str(checkpoint), tmp_path / "whole", overrides=RECIPE).path)
    Artifact.open(out, verify=True)
