"""The threads of a conversion: none of them shows in the artifact, and an error in one ends all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fut_convert import conversion, convert, pipeline
from fut_convert.quantize import module
from fut_convert.workers import Workers
from fut_runtime.artifact.reader import Artifact


@pytest.mark.parametrize("calibrated", [False, True])
def test_any_number_of_threads_gives_the_same_bytes(
    calibrated: bool, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_CPU", 16 * 128)
    monkeypatch.setattr(conversion, "_TILE", 16 * 128)
    checkpoint = tiny_checkpoint()
    overrides: dict[str, Any] = {
        "calibration.enabled": calibrated, "calibration.windows": 2, "calibration.window_tokens": 64,
        "calibration.allow_few_tokens": True,
    }  # fmt: skip
    files, errors = [], []
    for count in (1, 2, 7):
        monkeypatch.setattr(pipeline, "worker_count", lambda _, count=count: count)
        result = convert(str(checkpoint), tmp_path / str(count), overrides=overrides)
        files.append(Artifact.open(result.path, verify=True).files)
        errors.append(result.module_error)
    assert files[0] == files[1] == files[2]
    assert errors[0] == errors[1] == errors[2]


def test_results_keep_the_order_of_the_items() -> None:
    with Workers(4) as workers:
        assert workers.map(lambda i: i * i, range(100)) == [i * i for i in range(100)]


def test_pytorch_keeps_its_threads_outside_the_pool() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Workers(3) as workers:
            together = threading.Barrier(3)
            inside = workers.map(lambda _: (together.wait(), torch.get_num_threads())[1], range(3))
            assert inside == [1, 1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_error_ends_the_work() -> None:
    done = []

    def work(item: int) -> None:
        if item == 3:
            raise ValueError("three")
        done.append(item)

    with Workers(2) as workers, pytest.raises(ValueError, match="three"):
        workers.map(work, range(100_000))
    assert len(done) < 100_000


def test_an_interrupt_while_the_threads_start_leaves_none_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ThreadPoolExecutor):
        def map(self, fn: Callable[..., Any], *iterables: Any, **_: Any) -> Iterator[Any]:
            self.submit(fn, 0)
            raise KeyboardInterrupt

    monkeypatch.setattr("fut_convert.workers.ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Workers(3)
    assert not [t for t in threading.enumerate() if t.name.startswith("fut-convert")]
