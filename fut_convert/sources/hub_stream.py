"""A checkpoint on the Hub whose shards are fetched while it is converted, and never lie on the disk all at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fut_convert.errors import ReadError
from fut_convert.reading_order import ReadingOrder
from fut_convert.sources.base import Problem
from fut_convert.sources.directory import DirectorySource, WeightFile
from fut_convert.sources.hub_file import HubFile, HubFiles
from fut_convert.sources.safetensors_header import SafetensorsHeader, SafetensorsReader, read_header
from fut_convert.sources.shard_stream import ShardStream
from fut_convert.sources.stream_plan import Shard, StoredTensor, StreamPlan, plan_stream

#: Headers that are asked for at once.
_HEADERS_AT_ONCE = 8


class StreamedSource(DirectorySource):
    """An open checkpoint whose weights are on the Hub, to be converted while they come or, before they come, planned.

    Until `begin` its tensors are read from there one by one, which the plan does with small ones. From then on shards
    are fetched whole, and only vectors whose shard is not there yet, or not any more, are read by themselves.
    """

    def __init__(
        self, root: Path, identity: dict[str, Any], hub: HubFiles, shards: Mapping[str, HubFile], *, streaming: bool
    ) -> None:
        """Read the headers of `shards`; `root`, in the Hub's cache, holds all other files.

        Args:
            streaming: false where the shards will be fetched there before the conversion, and only its plan is wanted.

        Raises:
            PartsError: the Hub gives no parts of files.
        """
        self._hub = hub
        self._streaming = streaming
        self._stream: ShardStream | None = None
        with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            headers = pool.map(self._read_header, shards.values())
        self._shards = {file.name: StreamedShard(self, file, header) for file, header in zip(
            shards.values(), headers, strict=True
        )}  # fmt: skip
        super().__init__(root, identity)

    def bytes_to_come(self, place: Path | None = None) -> int:
        if self._streaming or (place is not None and place.stat().st_dev != self.location.stat().st_dev):
            return 0
        # Older versions of huggingface_hub go on with what an interrupted download has left under this name.
        begun = [self.location.parents[1] / "blobs" / f"{shard.file.oid}.incomplete" for shard in self._shards.values()]
        there = sum(path.stat().st_size for path in begun if path.is_file())
        return max(0, sum(shard.file.size for shard in self._shards.values()) - there)

    def stream_plan(self, order: ReadingOrder) -> StreamPlan | None:
        return self._stream_plan(order) if self._streaming else None

    def _stream_plan(self, order: ReadingOrder) -> StreamPlan:
        return plan_stream([_planned(shard, order) for shard in self._shards.values()], order.head_step)

    def begin(self, order: ReadingOrder, directory: Path, step: int) -> None:
        files = {name: shard.file for name, shard in self._shards.items()}
        self._stream = ShardStream(self._stream_plan(order), files, directory, self._hub.fetch, step)

    def enter(self, step: int) -> None:
        if self._stream is not None:
            self._stream.enter(step)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        super().close()

    def file_stamps(self) -> dict[str, list[int]]:
        return super().file_stamps() | {name: [shard.file.size] for name, shard in self._shards.items()}

    def read_into(self, shard: StreamedShard, buffer: memoryview, tensor: str, skip: int) -> None:
        """Fill a buffer with bytes of a tensor, from the disk or else from the Hub."""
        info = shard.tensors[tensor]
        if self._stream is None:
            return shard.read_remote(self._hub, buffer, tensor, skip)
        with self._stream.reading(shard.name, tensor, small=_is_small(info.shape)) as file:
            if file is not None:
                return file.read_into(buffer, tensor, skip)
        return shard.read_remote(self._hub, buffer, tensor, skip)

    def _file_problems(self) -> list[Problem]:
        problems = super()._file_problems()
        wanted, free = self.bytes_to_come(), shutil.disk_usage(self.location).free
        if wanted > free:
            problems.append(
                Problem(
                    "error",
                    f"{self._name}: its weights are {wanted / 1e9:.2f} GB more in the Hub's cache, "
                    f"{self.location.parents[2]}, and {free / 1e9:.2f} GB are free there; free some space, choose "
                    "another place with HF_HOME, or convert with --stream, which never has all of them on the disk",
                )
            )
        return problems

    def _top_names(self) -> set[str]:
        return super()._top_names() | self._shards.keys()

    def _open_file(self, name: str) -> WeightFile:
        shard = self._shards.get(name)
        return super()._open_file(name) if shard is None else shard

    def _weight_paths(self) -> Iterable[tuple[str, Path]]:
        return ((name, path) for name, path in super()._weight_paths() if name not in self._shards)

    def _read_header(self, file: HubFile) -> SafetensorsHeader:
        return read_header(file.name, file.size, lambda offset, length: self._hub.read(file.name, offset, length))


class StreamedShard(SafetensorsReader):
    """One shard of such a checkpoint."""

    def __init__(self, source: StreamedSource, file: HubFile, header: SafetensorsHeader) -> None:
        super().__init__(file.name, header)
        self.file = file
        self._source = source

    def read_into(self, buffer: memoryview, tensor: str, skip: int) -> None:
        self._source.read_into(self, buffer, tensor, skip)

    def read_remote(self, hub: HubFiles, buffer: memoryview, tensor: str, skip: int) -> None:
        """Fill a buffer with bytes of a tensor from the Hub."""
        begin = self.header.offsets[tensor] + skip
        if begin + len(buffer) > self.file.size:
            raise ReadError(f"{self.name}: ends inside {tensor}; ask its owner to upload it again")
        for offset, length in hub.parts(begin, len(buffer)):
            buffer[offset - begin : offset - begin + length] = hub.read(self.name, offset, length)

    def close(self) -> None:
        """Nothing is open."""


def _is_small(shape: tuple[int, ...]) -> bool:
    return len(shape) <= 1


def _planned(shard: StreamedShard, order: ReadingOrder) -> Shard:
    tensors = (
        StoredTensor(info.name, info.nbytes, order.steps(info.name), _is_small(info.shape))
        for info in shard.tensors.values()
    )
    return Shard(shard.name, shard.file.size, tuple(tensors))
