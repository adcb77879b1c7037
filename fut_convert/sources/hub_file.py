"""Files of a commit on the Hub, read in parts: a few bytes, or a whole file part by part, compared with its hash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but loaded on first use
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from fut_convert.errors import PartsError, ReadError
from fut_runtime.artifact.shard_writer import write_all
from fut_runtime.artifact.staging import fsync_directory, os_errors
from fut_runtime.hub.cached_files import matches
from fut_runtime.hub.listing import HubFile

__all__ = ["HubFile", "HubFiles"]

#: Bytes of a request: few enough to stop between two soon, enough to make nothing of what a request costs.
PART_BYTES = 32 << 20
_TIMEOUT_S = 30


class HubFiles:
    """Reads the files of one commit."""

    def __init__(
        self, model: str, commit: str, token: str | None, endpoint: str | None, call: Callable[[Callable[[], Any]], Any]
    ) -> None:
        """Read files of a model; `call` makes a request, tries again what may pass, and raises HubError."""
        self._model = model
        self._commit = commit
        self._token = token
        self._endpoint = endpoint
        self._call = call

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of a file.

        Raises:
            HubError: the Hub does not give them; PartsError: nor does it give parts of any file.
        """
        url = hf_hub_url(self._model, name, revision=self._commit, endpoint=self._endpoint)
        headers = {
            **build_hf_headers(token=self._token),
            "Range": f"bytes={offset}-{offset + length - 1}",
            # What is compressed on its way has no such parts.
            "Accept-Encoding": "identity",
        }

        def request() -> bytes:
            response = get_session().get(url, headers=headers, timeout=_TIMEOUT_S)
            hf_raise_for_status(response)
            content: bytes = response.content
            if response.status_code != 206 or len(content) != length:
                raise PartsError(
                    f"{self._model}: {name}: asked for {length} bytes from {offset} on, the Hub answered HTTP "
                    f"{response.status_code} with {len(content)}; without parts of files there is no --stream"
                )
            return content

        found: bytes = self._call(request)
        return found

    @staticmethod
    def parts(offset: int, length: int) -> Iterator[tuple[int, int]]:
        """Offset and length of the parts in which a stretch of a file is best asked for."""
        for start in range(offset, offset + length, PART_BYTES):
            yield start, min(PART_BYTES, offset + length - start)

    def fetch(self, file: HubFile, path: Path, stopped: Callable[[], bool]) -> bool:
        """Fetch a file whole, going on with what an interrupted fetch left; False where it was `stopped` before.

        Raises:
            HubError: the Hub does not give it.
            ReadError: it does not have its hash, though fetched twice.
            ArtifactError: the disk refuses.
        """
        part = path.with_name(f"{path.name}.part")
        for _ in range(2):
            if not self._fetch_part(file, part, stopped):
                return False
            with os_errors(part, "cannot be put in place"):
                if matches(part, file.oid):
                    os.replace(part, path)
                    fsync_directory(path.parent)
                    return True
                part.unlink()
        raise ReadError(
            f"{self._model}: {file.name} does not have the hash that the Hub gives for it, even when fetched again; "
            "check the disk and the network, or ask its owner to upload it again"
        )

    def _fetch_part(self, file: HubFile, part: Path, stopped: Callable[[], bool]) -> bool:
        with os_errors(part, "cannot be written"):
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            present = min(os.fstat(descriptor).st_size, file.size)
            for offset, length in self.parts(present, file.size - present):
                if stopped():
                    return False
                data = self.read(file.name, offset, length)
                with os_errors(part, "cannot be written"):
                    write_all(descriptor, memoryview(data), offset)
            with os_errors(part, "cannot be flushed"):
                os.ftruncate(descriptor, file.size)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return True
