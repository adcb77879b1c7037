"""What the tests share: the small real model, synthetic checkpoints, and limits on threads and time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file

from csrc.nvcc import Nvcc, find_nvcc
from fut_convert import convert
from odd_checkpoints import write_odd_checkpoint
from repository import REPOSITORY
from synthetic_checkpoint import CheckpointShape, write_checkpoint

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A shell starts what it puts into the background with Ctrl-C ignored, and so the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared machine's speed says nothing about the code, and a failure in CI must fail again when it is looked at.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Tests run side by side: together their threads should fill the machine once, not once each.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // _workers))))


@pytest.fixture(autouse=True)
def report_only_where_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the report of `convert` out by default: of a tiny conversion it is three quarters of the time."""
    if request.node.get_closest_marker("reports") is None:
        monkeypatch.setitem(convert.__kwdefaults__, "report", False)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF file; `make model` downloads it."""
    named = os.environ.get("FUT_SMOLLM2_GGUF")
    path = Path(named) if named else REPOSITORY / ".cache" / "models" / GGUF_NAME
    if not path.exists():
        pytest.skip(f"{path.name} is not here: run `make model`, or set FUT_SMOLLM2_GGUF to its path")
    return path


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_gguf: Path, run_dir: Path) -> Path:
    """The same model as an ordinary BF16 checkpoint directory, made by our own GGUF reader."""
    return _made_once(run_dir / "smollm2", lambda path: _write_smollm2(smollm2_gguf, path))


@pytest.fixture
def nvcc() -> Nvcc:
    """The compiler that the library would be built with."""
    found = find_nvcc()
    if found is None:
        pytest.skip("no nvcc: neither CUDA_HOME, nor on the path, nor the package nvidia-cuda-nvcc")
    return found


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a synthetic checkpoint: `tiny_checkpoint("name", hidden=256, tied=True)`, see CheckpointShape."""

    def make(name: str = "checkpoint", **sizes: object) -> Path:
        return write_checkpoint(tmp_path / name, CheckpointShape(**sizes))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def odd_checkpoint(run_dir: Path) -> Callable[[str], Path]:
    """Makes one of ODD_CHECKPOINTS: `odd_checkpoint("head_dim_80")`, once for all tests."""

    def make(name: str) -> Path:
        return _made_once(run_dir / "odd" / name, lambda path: write_odd_checkpoint(name, path))

    return make


@pytest.fixture(scope="session")
def wikitext2_test() -> Path:
    """WikiText-2's raw test set, where the machine has it beside the repository."""
    path = REPOSITORY.parent / "shared" / "data" / "wikitext2-raw-test.txt"
    if not path.exists():
        pytest.skip("WikiText-2 is not on this machine (../shared/data/wikitext2-raw-test.txt)")
    return path


@pytest.fixture(scope="session")
def calibration_text() -> Path:
    """The calibration text that ships with the package."""
    return REPOSITORY / "fut_convert" / "data" / "calibration.txt"


def _made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Let one worker make `path` while the others wait; half-made directories of a crashed worker are made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = path.with_name(path.name + ".done")
    with FileLock(path.with_name(path.name + ".lock")):
        if not done.exists():
            make(path)
            done.touch()
    return path


def _write_smollm2(gguf: Path, directory: Path) -> None:
    from fut_convert.sources import open_source

    directory.mkdir(exist_ok=True)
    with open_source(str(gguf)) as source:
        tensors = {name: source.load(name).to(torch.bfloat16).contiguous() for name in source.tensors}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        for name, contents in source.side_files():
            (directory / name).write_bytes(contents if isinstance(contents, bytes) else contents.read_bytes())
