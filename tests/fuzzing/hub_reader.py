"""The Hub: what it answers, and the lists of files in a repository."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from unittest.mock import patch

from fut_convert.sources.hub import open_hub_model
from fut_runtime.errors import FutError
from fut_runtime.hub.download import fetch_artifact
from fuzzing.checkpoint_readers import INDEX
from fuzzing.reader import Files, Reader, damage_document, files_of
from hub_client import client_settings
from local_hub import LocalHub, serve
from synthetic_checkpoint import CheckpointShape, write_checkpoint
from tiny_artifact import write_artifact


class HubReader(Reader):
    """What the Hub answers about a repository, and the lists of files in it."""

    name = "hub"
    #: Threads of the client and of the server have address space of their own.
    memory_bytes = 8 << 30

    def make(self, folder: Path) -> Files:
        self._stack = ExitStack()
        self._hub = LocalHub()
        self._address = self._stack.enter_context(serve(self._hub))
        self._stack.enter_context(patch.dict("os.environ", {"NO_PROXY": "127.0.0.1", "HF_TOKEN": ""}))
        self._stack.enter_context(patch.object(time, "sleep"))
        for module, setting, value in client_settings(self._address, folder):
            self._stack.enter_context(patch.object(module, setting, value, create=True))
        model = files_of(write_checkpoint(folder / "model", CheckpointShape(layers=1, vocab_size=300, shards=2)))
        artifact = files_of(write_artifact(folder / "artifact"))
        self._repos = {"me/model": model, "me/artifact": artifact}
        whole = {}
        for repo, files in self._repos.items():
            self._hub.publish(repo, files)
            siblings = [
                {"rfilename": name, "size": len(content), "blobId": "0" * 40} for name, content in files.items()
            ]
            info = {"_id": "1", "id": repo, "sha": self._commit(repo), "private": False, "siblings": siblings}
            whole[f"{repo}/info"] = json.dumps(info).encode()
        return {**whole, "me/model/index": model[INDEX], "me/artifact/list": artifact["fut_files.json"]}

    def damaged(self, random: Random) -> Files:
        files = dict(self.whole)
        name = random.choice(("me/model/info", *files))
        files[name] = damage_document(random, files[name])
        return files

    def read(self, folder: Path) -> None:
        changed = {"me/model": {INDEX: "index"}, "me/artifact": {"fut_files.json": "list"}}
        for repo, names in changed.items():
            contents = {name: (folder / repo / source).read_bytes() for name, source in names.items()}
            self._hub.repos[repo].branches.clear()
            self._hub.publish(repo, self._repos[repo] | contents)
            self._hub.infos[repo] = (folder / repo / "info").read_bytes()
        errors: list[FutError] = []
        for read in (self._fetch_model, self._stream_model, self._fetch_artifact):
            try:
                read(folder / "cache")
            except FutError as error:
                errors.append(error)
        outside = [path for path in folder.rglob("*") if path.name == "passwd"]
        assert not outside, outside
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._stack.close()

    def _commit(self, repo: str) -> str:
        return self._hub.repos[repo].branches["main"][-1][0]

    def _fetch_model(self, cache: Path) -> None:
        open_hub_model("me/model", endpoint=self._address, cache_dir=cache / "whole").close()

    def _stream_model(self, cache: Path) -> None:
        open_hub_model("me/model", endpoint=self._address, cache_dir=cache / "streamed", stream=True).close()

    def _fetch_artifact(self, cache: Path) -> None:
        fetch_artifact("me/artifact", endpoint=self._address, cache_dir=cache / "artifact")
