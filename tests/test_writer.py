"""The writer: whole or not at all, the same bytes every time, one writer at a time."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fut_runtime.artifact import hashing
from fut_runtime.artifact.hashing import CHUNK_BYTES, RunningHash, hash_bytes, hash_file
from fut_runtime.artifact.layout import all_tensors
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.staging import StagingDirectory
from fut_runtime.artifact.verify import verify_artifact
from fut_runtime.artifact.writer import ArtifactWriter
from fut_runtime.errors import ArtifactError
from tiny_artifact import make_manifest, random_tensors, write_artifact

MANIFEST = make_manifest()
TENSORS = random_tensors(MANIFEST)
SIDE_FILES = {"tokenizer.json": b'{"a": 1}\n', "original/params.json": b"{}", "empty.txt": b""}


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    out = write_artifact(tmp_path / "out", MANIFEST, side_files=SIDE_FILES, max_shard_bytes=60_000)
    artifact = Artifact.open(out, verify=True)
    assert len(artifact.shards) > 2
    for name, tensor in TENSORS.items():
        assert torch.equal(artifact.tensor(name).view(torch.uint8), tensor.view(torch.uint8)), name
    for name, content in SIDE_FILES.items():
        assert artifact.side_file(name).read_bytes() == content
    assert not (tmp_path / "out.partial").exists()


def test_a_gap_is_not_saved(tmp_path: Path) -> None:
    first, second, third, *_ = TENSORS
    with ArtifactWriter(tmp_path / "out", MANIFEST, inputs={}) as writer:
        writer.write(first, TENSORS[first])
        writer.write(third, TENSORS[third])
        with pytest.raises(ArtifactError, match=f"tensor {third} is written, but not those before it"):
            writer.save({})
        writer.write(second, TENSORS[second])
        writer.save({})


def test_a_failure_of_the_hashing_thread_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    first, *_ = TENSORS
    with ArtifactWriter(tmp_path / "out", MANIFEST, inputs={}) as writer:
        monkeypatch.setattr(hashing.RunningHash, "update", fail)
        writer.write(first, TENSORS[first])
        with pytest.raises(MemoryError):
            writer.save({})


def test_sealed_set_is_reproducible_in_any_order_of_writing(tmp_path: Path) -> None:
    one = write_artifact(tmp_path / "one", MANIFEST, max_shard_bytes=60_000)
    names = list(TENSORS)
    random.Random(0).shuffle(names)
    with ArtifactWriter(tmp_path / "two", MANIFEST, max_shard_bytes=60_000) as writer:
        for name in names:
            writer.write(name, TENSORS[name])
        writer.write_log("conversion_log.json", "{}")
        two = writer.seal()
        writer.write_log("report.md", "after sealing")
    found = contents(two)
    assert found.pop("conversion_log.json") == b"{}" and found.pop("report.md") == b"after sealing"
    assert found == contents(one)


def test_several_threads_may_write(tmp_path: Path) -> None:
    one = write_artifact(tmp_path / "one", MANIFEST, max_shard_bytes=60_000)
    with ArtifactWriter(tmp_path / "two", MANIFEST, max_shard_bytes=60_000) as writer:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: writer.write(name, TENSORS[name]), reversed(TENSORS)))
        two = writer.seal()
    assert contents(two) == contents(one)


def test_tensors_may_come_in_parts(tmp_path: Path) -> None:
    one = write_artifact(tmp_path / "one", MANIFEST, max_shard_bytes=60_000)
    with ArtifactWriter(tmp_path / "two", MANIFEST, max_shard_bytes=60_000) as writer:
        parts = [(name, start) for name, tensor in TENSORS.items() for start in range(0, len(tensor), 3)]
        random.Random(0).shuffle(parts)
        for name, start in parts:
            assert name in writer.missing
            writer.write_rows(name, start, TENSORS[name][start : start + 3])
        two = writer.seal()
    assert contents(two) == contents(one)


def test_refused_parts(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out", MANIFEST) as writer:
        embed = TENSORS["embed"]
        for start, rows in [(-1, embed[:2]), (49, embed[:2]), (0, embed[:0]), (0, embed[:, 1:]), (0, embed[0, 0])]:
            with pytest.raises(ArtifactError, match="expected torch"):
                writer.write_rows("embed", start, rows)
        writer.write_rows("embed", 10, embed[10:20])
        for start, rows in [(10, embed[10:11]), (0, embed)]:
            with pytest.raises(ArtifactError, match="written already"):
                writer.write_rows("embed", start, rows)
        assert "embed" in writer.missing


def test_flushed_parts_are_hashed_like_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_FLUSH_BYTES", 10_000)
    monkeypatch.setattr(hashing, "_BLOCK_BYTES", 4096)
    assert verify_artifact(write_artifact(tmp_path / "out", MANIFEST)).ok


def test_strided_tensors_are_written_in_order(tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    tensors["embed"] = TENSORS["embed"].t().contiguous().t()
    assert not tensors["embed"].is_contiguous()
    out = write_artifact(tmp_path / "out", MANIFEST, tensors=tensors)
    assert torch.equal(Artifact.open(out).tensor("embed"), TENSORS["embed"])


def test_wrong_tensors_are_refused(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out", MANIFEST) as writer:
        with pytest.raises(ArtifactError, match="no tensor 'nothing'"):
            writer.write("nothing", torch.zeros(1))
        with pytest.raises(ArtifactError, match=r"embed is torch.float32 .*expected torch.bfloat16 \(50, 72\)"):
            writer.write("embed", TENSORS["embed"].float())
        with pytest.raises(ArtifactError, match="expected"):
            writer.write("embed", TENSORS["embed"][:-1])
        writer.write("embed", TENSORS["embed"])
        with pytest.raises(ArtifactError, match="written already"):
            writer.write("embed", TENSORS["embed"])
        with pytest.raises(ArtifactError, match="tensors are not written"):
            writer.seal()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ArtifactWriter(tmp_path / "out", MANIFEST) as writer:
        writer.write("embed", TENSORS["embed"])
        assert (tmp_path / "out.partial").is_dir()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArtifactError, match="given up"):
        writer.write("final_norm", TENSORS["final_norm"])


def test_existing_output(tmp_path: Path) -> None:
    out = write_artifact(tmp_path / "out", MANIFEST)
    before = contents(out)
    with pytest.raises(ArtifactError, match="exists already"):
        ArtifactWriter(out, MANIFEST)
    with pytest.raises(RuntimeError), ArtifactWriter(out, MANIFEST, overwrite=True):
        raise RuntimeError
    assert contents(out) == before, "a failed conversion must not touch the artifact it was to replace"
    changed = {**TENSORS, "final_norm": TENSORS["final_norm"] + 1}
    write_artifact(out, MANIFEST, tensors=changed, overwrite=True)
    assert torch.equal(Artifact.open(out).tensor("final_norm"), changed["final_norm"])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_only_artifacts_are_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("ten years of work")
    with pytest.raises(ArtifactError, match="will not be replaced"):
        ArtifactWriter(home, MANIFEST, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="is a file"):
        ArtifactWriter(tmp_path / "file", MANIFEST, overwrite=True)
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(ArtifactError, match="is a link"):
        ArtifactWriter(tmp_path / "link", MANIFEST, overwrite=True)
    assert (home / "thesis.tex").exists()


def test_a_failed_rename_puts_the_old_artifact_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_artifact(tmp_path / "out", MANIFEST)
    before = contents(out)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if source.name == "out.partial":
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(ArtifactError, match="cannot be put in place"):
        write_artifact(out, MANIFEST, overwrite=True)
    assert contents(out) == before and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_directory_may_be_the_output(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert Artifact.open(write_artifact(tmp_path / "out", MANIFEST)).manifest == MANIFEST


def test_remains_of_a_crash_are_cleared(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    (partial / "sub").mkdir(parents=True)
    (partial / "sub" / "old").write_text("x")
    (partial / "fut_sealed.json").write_text("{}")
    with pytest.raises(ArtifactError, match="will not be cleared"):
        write_artifact(tmp_path / "out", MANIFEST)
    (partial / ".fut_lock").write_text("pid 1")
    out = write_artifact(tmp_path / "out", MANIFEST)
    assert "sub/old" not in contents(out)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from fut_runtime.artifact.staging import StagingDirectory
        from fut_runtime.errors import ArtifactError
        try:
            StagingDirectory(Path(sys.argv[1]))
        except ArtifactError as error:
            sys.exit(str(error))
    """)
    with ArtifactWriter(tmp_path / "out", MANIFEST) as writer:
        with pytest.raises(ArtifactError, match="another process"):
            ArtifactWriter(tmp_path / "out", MANIFEST)
        command = [sys.executable, "-c", program, str(tmp_path / "out")]
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert other.returncode == 1 and f"pid {os.getpid()}" in other.stderr
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        writer.seal()


def test_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    first = StagingDirectory(tmp_path / "out")
    first.abort()
    StagingDirectory(tmp_path / "out").abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing_call", [1, 4])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int) -> None:
    calls = 0
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ArtifactError, match=r"the disk is full \(.* GB left\)"):
        write_artifact(tmp_path / "out", MANIFEST)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_at_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems only find out when the data leave the page cache: in the hashing thread."""

    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.raises(ArtifactError, match="the disk is full"), ArtifactWriter(tmp_path / "out", MANIFEST) as writer:
        monkeypatch.setattr(os, "fsync", full)
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        writer.seal()
    assert list(tmp_path.iterdir()) == []


def test_real_full_disk(tmp_path: Path) -> None:
    """The same with a file size limit set by the system instead of an invented error."""
    program = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from fut_runtime.errors import ArtifactError
        from tiny_artifact import write_artifact
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            write_artifact(Path(sys.argv[1]))
        except ArtifactError as error:
            print(error)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "model-00001-of-00001.safetensors: tensor" in result.stdout and "File too large" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../out", "/etc/passwd", "a/../../b", "a//b", ".", "", "a\\b", "c:d", "a\nb", "fut_config.json"]
)
def test_unsafe_side_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArtifactError, match=r"unsafe|uses itself"):
        write_artifact(tmp_path / "out", MANIFEST, side_files={name: b""})
    with (
        ArtifactWriter(tmp_path / "out", MANIFEST) as writer,
        pytest.raises(ArtifactError, match=r"unsafe|uses itself"),
    ):
        writer.write_log(name, "")
    assert list(tmp_path.iterdir()) == []


def test_side_files_follow_the_manifest(tmp_path: Path) -> None:
    manifest = make_manifest(side_files=("tokenizer.json",))
    with ArtifactWriter(tmp_path / "out", manifest) as writer:
        with pytest.raises(ArtifactError, match="not among"):
            writer.copy_side_file(b"", "other.json")
        with pytest.raises(ArtifactError, match="name of a side file"):
            writer.write_log("tokenizer.json", "")
        with pytest.raises(ArtifactError, match="cannot be read"):
            writer.copy_side_file(tmp_path / "tokenizer.json", "tokenizer.json")
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        with pytest.raises(ArtifactError, match="not copied"):
            writer.seal()


def test_links_out_of_the_checkpoint_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "sub").mkdir(parents=True)
    (checkpoint / "tokenizer.json").symlink_to("../secret")
    (checkpoint / "sub" / "a.json").symlink_to("../real.json")
    (checkpoint / "real.json").write_text("real")
    manifest = make_manifest(side_files=("sub/a.json", "tokenizer.json"))
    with ArtifactWriter(tmp_path / "out", manifest) as writer:
        with pytest.raises(ArtifactError, match="links out are not followed"):
            writer.copy_side_file(checkpoint / "tokenizer.json", "tokenizer.json")
        writer.copy_side_file(checkpoint / "sub" / "a.json", "sub/a.json")


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    with ArtifactWriter(tmp_path / "out", make_manifest(side_files=("tokenizer.json",))) as writer:
        writer.copy_side_file(snapshot / "tokenizer.json", "tokenizer.json")


def test_invalid_manifest_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    manifest = make_manifest()
    del manifest.weights["layers.0.qkv"]
    with pytest.raises(ArtifactError, match=r"lacks layers.0.qkv"):
        ArtifactWriter(tmp_path / "out", manifest)
    assert list(tmp_path.iterdir()) == []


def test_missing_lists_what_is_left(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out", MANIFEST) as writer:
        names = [spec.name for spec in all_tensors(MANIFEST)]
        assert writer.missing == names
        writer.write(names[3], TENSORS[names[3]])
        assert writer.missing == names[:3] + names[4:]


def test_chunk_hashes(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1 << 20) * (CHUNK_BYTES >> 20) + b"tail"
    (tmp_path / "f").write_bytes(data)
    expected = hash_file(tmp_path / "f")
    assert expected.size == len(data) and len(expected.chunks) == 2
    assert expected.chunks == (hash_bytes(data[:CHUNK_BYTES]).sha256, hash_bytes(b"tail").sha256)
    running = RunningHash()
    for start in range(0, len(data), 7_000_001):
        running.update(memoryview(data)[start : start + 7_000_001])
    assert running.result() == expected
    assert hash_bytes(b"").chunks == ()
