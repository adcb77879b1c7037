"""Shards that come from the Hub while a conversion runs, and go when it needs them no more, as `stream_plan` has it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from fut_convert.sources.hub_file import HubFile
from fut_convert.sources.safetensors_file import SafetensorsFile
from fut_convert.sources.shard_store import ShardStore
from fut_convert.sources.stream_plan import Shard, StreamPlan
from fut_runtime.artifact.staging import os_errors

#: Fetch(file, path, stopped) -> whether it is there now, see `HubFiles.fetch`.
Fetch = Callable[[HubFile, Path, Callable[[], bool]], bool]
#: Seconds that the end of a conversion waits for the part that is being fetched. What comes later is not written.
_PATIENCE_S = 10


class ShardStream:
    """Keeps the shards of each step on the disk, and fetches the next ones in a thread of its own."""

    def __init__(
        self, plan: StreamPlan, files: Mapping[str, HubFile], directory: Path, fetch: Fetch, first_step: int
    ) -> None:
        """Take up what an interrupted run left in the directory that is still needed from a step on.

        Raises:
            ArtifactError: the directory cannot be made or read.
        """
        self._plan, self._files, self._fetch = plan, files, fetch
        self._stopped = threading.Event()
        self._work: queue.SimpleQueue[Shard | None] = queue.SimpleQueue()
        self._coming: dict[str, Future[None]] = {}
        self._stores: dict[str, ShardStore] = {}
        self._held: dict[str, int] = {}
        with os_errors(directory, "cannot be used"):
            directory.mkdir(parents=True, exist_ok=True)
            for number, shard in enumerate(plan.order):
                store = self._stores[shard.name] = ShardStore(shard.name, directory / f"shard-{number:05d}")
                oid = self._files[shard.name].oid
                if store.take_up((tensor.name for tensor in shard.rest(first_step)), oid):
                    self._arrived(shard)
        self._thread = threading.Thread(target=self._run, name="fut-fetch", daemon=True)
        self._thread.start()

    def enter(self, step: int) -> None:
        """Begin a step: let go what it and those after it do not need, have the next shards fetched, await its own.

        Raises:
            HubError, ReadError, ArtifactError: a shard cannot be fetched or kept.
        """
        for shard in self._plan.order:
            coming = self._coming.get(shard.name)
            if coming is not None and coming.done():
                coming.result()
                self._reduce(shard, step)
        for shard in self._plan.fetched_by(step):
            if shard.rest(step) and shard.name not in self._coming:
                self._coming[shard.name] = Future()
                self._work.put(shard)
        for shard in self._plan.order:
            if any(step in tensor.steps and not tensor.small for tensor in shard.tensors):
                self._coming[shard.name].result()

    @contextmanager
    def reading(self, shard: str, tensor: str, *, small: bool) -> Iterator[SafetensorsFile | None]:
        """The file that holds a tensor, awaited while it is on its way; None for a small one whose shard is not there.

        Raises:
            HubError, ReadError, ArtifactError: it cannot be fetched.
        """
        coming = self._coming.get(shard)
        if coming is not None and not (small and not coming.done()):
            coming.result()
        store = self._stores.get(shard)
        if store is None:
            yield None
            return
        with store.reading(tensor) as file:
            yield file

    def close(self) -> None:
        """Stop fetching, and leave what is on the disk for another run."""
        self._stopped.set()
        self._work.put(None)
        self._thread.join(_PATIENCE_S)
        for store in self._stores.values():
            store.close()

    def _reduce(self, shard: Shard, step: int) -> None:
        held = self._held[shard.name]
        kept = shard.kept(held, step)
        if kept < held:
            self._stores[shard.name].reduce([tensor.name for tensor in shard.rest(step)])
            self._held[shard.name] = kept

    def _arrived(self, shard: Shard) -> None:
        store = self._stores[shard.name]
        whole = store.tensors >= {tensor.name for tensor in shard.tensors}
        sizes = (tensor.nbytes for tensor in shard.tensors if tensor.name in store.tensors)
        self._held[shard.name] = shard.nbytes if whole else sum(sizes)
        self._coming.setdefault(shard.name, Future()).set_result(None)

    def _run(self) -> None:
        while (shard := self._work.get()) is not None and not self._stopped.is_set():
            coming = self._coming[shard.name]
            store = self._stores[shard.name]
            try:
                if not self._fetch(self._files[shard.name], store.whole, self._stopped.is_set):
                    return
                store.open(tensor.name for tensor in shard.tensors)
                self._arrived(shard)
            except BaseException as error:
                coming.set_exception(error)
                return
