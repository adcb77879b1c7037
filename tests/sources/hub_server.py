"""A Hub on 127.0.0.1 that knows one model: enough of the protocol for huggingface_hub to download from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from http_serving import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubModel:
    """A model, and what the Hub answers about it.

    Attributes:
        directory: its files.
        name: its id.
        revisions: names that lead to COMMIT.
        gated: without `token`, access is refused with this HTTP status and the error code of a gated model.
        token: what grants access.
        fetched: names of the files sent so far, in order.
    """

    directory: Path
    name: str = "some-one/some-model"
    revisions: tuple[str, ...] = ("main", "v1.0", COMMIT)
    gated: int | None = None
    token: str = "secret"
    failing: int | None = None
    fetched: list[str] = field(default_factory=list)

    def files(self) -> dict[str, bytes]:
        """Contents by name."""
        paths = (path for path in self.directory.rglob("*") if path.is_file())
        return {path.relative_to(self.directory).as_posix(): path.read_bytes() for path in sorted(paths)}


@contextmanager
def serve(model: HubModel) -> Iterator[str]:
    """Run the Hub; yields its address."""

    class Handler(_Handler):
        hub = model

    with serving(Handler) as address:
        yield address


class _Handler(BaseHTTPRequestHandler):
    hub: HubModel
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+?)(?:/(revision|tree)/(.+?))?", path)
        resolve = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path)
        match = api or resolve
        if match is None:
            return self._send(404, {})
        if self.hub.failing is not None:
            return self._send(self.hub.failing, {})
        if match[1] != self.hub.name:
            # The Hub does not tell strangers whether a private model exists.
            return self._send(401, {"X-Error-Code": "RepoNotFound"})
        if self.hub.gated is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._send(self.hub.gated, {"X-Error-Code": "GatedRepo"})
        revision = (api[3] if api else resolve[2] if resolve else None) or "main"
        if revision not in self.hub.revisions:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.files()
        if resolve:
            return self._send_file(resolve[3], files.get(resolve[3]), body)
        if api and api[2] == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)} for name, data in files.items()
            ]
            return self._send(200, {}, json.dumps(entries).encode())
        info = {"id": self.hub.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        return self._send(200, {}, json.dumps(info).encode())

    def _send_file(self, name: str, data: bytes | None, body: bool) -> None:
        if data is None:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        if body:
            self.hub.fetched.append(name)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(data)}"'}
        return self._send(200, headers, data, body)

    def _send(self, status: int, headers: dict[str, str], data: bytes = b"{}", body: bool = True) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
