"""A Hub on 127.0.0.1 that takes and gives repositories as far as huggingface_hub needs, and fails on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from http_serving import serving

#: What the Hub stores as large files, by name.
_LARGE = (".safetensors", ".bin", ".png")
_PART_BYTES = 60_000


@dataclass
class Fault:
    """What goes wrong with requests whose method and path match `request`, `times` times.

    Attributes:
        request: pattern of `METHOD /path`.
        status: answered instead, with `headers` and `error` as the Hub's own words.
        cut: close the connection after so many bytes of the body, of the answer or of what is sent.
        corrupt: send a body with one byte changed.
        skip: leave so many matching requests alone first.
    """

    request: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    error: str = ""
    cut: int | None = None
    corrupt: bool = False
    times: int = 1
    skip: int = 0


@dataclass
class Repo:
    """Branches of a repository, each a list of commits: (id, message, contents by name)."""

    private: bool = False
    branches: dict[str, list[tuple[str, str, dict[str, bytes]]]] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and contents of a branch or commit."""
        if revision in self.branches:
            commit, _, files = self.branches[revision][-1]
            return commit, files
        found = [c for commits in self.branches.values() for c in commits if c[0] == revision]
        return (found[0][0], found[0][2]) if found else None


@dataclass
class LocalHub:
    """The Hub's state.

    Attributes:
        repos: by id.
        tokens: token -> role of it; all belong to the account `me`, which is in the organisation `team`.
        gated: id -> status without a token of the account's.
        multipart: whether large files are taken in parts.
        ranges: whether parts of files are given.
        faults: what goes wrong next.
        asked: every request so far, as `METHOD /path`.
        sent: every part of a file that was asked for, as its name, beginning and end.
        infos: answers about a repository that are given in place of true ones, by its id.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=lambda: {"hf_writer": "write", "hf_reader": "read"})
    gated: dict[str, int] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    multipart: bool = False
    ignored: frozenset[str] = frozenset()
    ranges: bool = True
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    infos: dict[str, bytes] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def publish(self, repo: str, files: dict[str, bytes], branch: str = "main", message: str = "first") -> str:
        """Make a commit with exactly these files; returns its id."""
        commits = self.repos.setdefault(repo, Repo()).branches.setdefault(branch, [])
        seed = json.dumps([repo, branch, len(commits), message]).encode()
        commits.append((hashlib.sha1(seed).hexdigest(), message, dict(files)))
        return commits[-1][0]

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """Contents of a branch."""
        return self.repos[repo].branches[branch][-1][2]

    def count(self, request: str) -> int:
        """How many requests matched a pattern."""
        return sum(re.search(request, line) is not None for line in self.asked)

    def take_fault(self, line: str) -> Fault | None:
        """The fault that this request meets, if any."""
        with self.lock:
            self.asked.append(line)
            for fault in self.faults:
                if fault.times and re.search(fault.request, line):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def serve(hub: LocalHub) -> Iterator[str]:
    """Run the Hub; yields its address."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    with serving(Handler) as address:
        yield address


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"
    timeout = 30  # a test that waits for bytes that never come shall end

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._handle()

    do_GET = do_POST = do_PUT = do_HEAD  # noqa: N815

    def _handle(self) -> None:
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        self.fault = self.hub.take_fault(f"{self.command} {path}")
        if self.fault is not None and self.fault.cut is not None and self.command in ("PUT", "POST"):
            self.rfile.read(min(self.fault.cut, int(self.headers.get("Content-Length") or 0)))
            self.close_connection = True
            self.connection.close()
            return None
        body = self._body()
        if self.fault is not None and self.fault.status is not None:
            return self._error(self.fault.status, self.fault.error, **self.fault.headers)
        authorization = self.headers.get("Authorization", "")
        token = authorization.removeprefix("Bearer ")
        self.role = self.hub.tokens.get(token)
        if authorization and self.role is None:
            return self._error(401, "Invalid credentials in Authorization header")
        for pattern, handler in _ROUTES:
            match = re.fullmatch(pattern, f"{self.command} {path}")
            if match:
                return handler(self, body, **match.groupdict())
        return self._error(404, f"no such endpoint: {path}")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def whoami(self, body: bytes) -> None:
        if self.role is None:
            return self._error(401, "Invalid username or password.")
        access = {"accessToken": {"role": self.role}}
        return self._json({"name": "me", "orgs": [{"name": "team"}], "auth": access})

    def create(self, body: bytes) -> None:
        data = json.loads(body)
        name = f"{data.get('organization') or 'me'}/{data['name']}"
        if not self._may_write(name):
            return None
        if name in self.hub.repos:
            return self._json({"error": "You already created it", "url": f"{self._address()}/{name}"}, 409)
        self.hub.publish(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, message="initial commit")
        self.hub.repos[name].private = bool(data.get("private")) or data.get("visibility") == "private"
        return self._json({"url": f"{self._address()}/{name}", "id": "1", "name": name})

    def branch(self, body: bytes, repo: str, branch: str) -> None:
        if not self._may_write(repo):
            return None
        branches = self.hub.repos[repo].branches
        if branch in branches:
            return self._error(409, "Reference already exists")
        branches[branch] = list(branches["main"])
        return self._json({})

    def validate(self, body: bytes) -> None:
        if "license: nonsense" in json.loads(body)["content"]:
            return self._json({"errors": [{"message": '"license" is not one of those known'}], "warnings": []}, 400)
        return self._json({"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        if not self._may_write(repo) or (found := self._at(repo, revision)) is None:
            return None
        answer = []
        for file in json.loads(body)["files"]:
            name = file["path"]
            content = found[1].get(name)
            oid = None if content is None else _oid(name, content)
            mode = "lfs" if name.endswith(_LARGE) else "regular"
            ignored = name in self.hub.ignored
            answer.append({"path": name, "uploadMode": mode, "shouldIgnore": ignored, "oid": oid})
        return self._json({"files": answer})

    def batch(self, body: bytes, repo: str) -> None:
        if not self._may_write(repo):
            return None
        objects = []
        for item in json.loads(body)["objects"]:
            url = f"{self._address()}/storage/{item['oid']}"
            header: dict[str, str] = {}
            if self.hub.multipart and item["size"]:
                count = -(-item["size"] // _PART_BYTES)
                header = {"chunk_size": str(_PART_BYTES)} | {str(i): f"{url}?part={i}" for i in range(1, count + 1)}
            here = item["oid"] in self.hub.large_files
            actions = {"actions": {"upload": {"href": url, "header": header}}}
            objects.append({"oid": item["oid"], "size": item["size"], **({} if here else actions)})
        return self._json({"transfer": "multipart" if self.hub.multipart else "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        part = self.query.get("part")
        if part:
            self.hub.parts.setdefault(oid, {})[int(part[0])] = body
        elif hashlib.sha256(body).hexdigest() != oid:
            return self._error(400, "the content has another hash")
        else:
            self.hub.large_files[oid] = body
        return self._send(200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b"")

    def complete(self, body: bytes, oid: str) -> None:
        parts = self.hub.parts.pop(oid)
        assert [p["partNumber"] for p in json.loads(body)["parts"]] == sorted(parts)
        return self.store(b"".join(parts[i] for i in sorted(parts)), oid)

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        if not self._may_write(repo) or (found := self._at(repo, revision)) is None:
            return None
        files, message = dict(found[1]), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.large_files:
                    return self._error(400, "a large file of this commit was never uploaded")
                files[value["path"]] = self.hub.large_files[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        oid = self.hub.publish(repo, files, revision, message)
        return self._json({"commitUrl": f"{self._address()}/{repo}/commit/{oid}", "commitOid": oid})

    def info(self, body: bytes, repo: str, revision: str | None) -> None:
        if not self._may_read(repo) or (found := self._at(repo, revision or "main")) is None:
            return None
        if repo in self.hub.infos:
            return self._send(200, {"Content-Type": "application/json"}, self.hub.infos[repo])
        siblings = [
            {"rfilename": name, "size": len(content), "blobId": _git_sha(content), **_lfs(name, content, "sha256")}
            for name, content in sorted(found[1].items())
        ]
        answer = {"_id": "1", "id": repo, "sha": found[0], "private": self.hub.repos[repo].private}
        return self._json({**answer, "siblings": siblings})

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        if not self._may_read(repo) or (found := self._at(repo, revision)) is None:
            return None
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": _git_sha(content), **_lfs(name, content, "oid")}
            for name, content in sorted(found[1].items())
        ]
        return self._json(entries)

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        if not self._may_read(repo) or (found := self._at(repo, revision)) is None:
            return None
        commit, files = found
        if name not in files:
            return self._error(404, "Entry not found", **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(name, content)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.hub.ranges:
            start = int(wanted[1])
            stop = min(len(content), int(wanted[2]) + 1) if wanted[2] else len(content)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            self.hub.sent.append((name, start, stop))
            return self._send(206, headers, content[start:stop])
        return self._send(200, headers, content)

    def _may_write(self, repo: str) -> bool:
        if self.role is None:
            self._error(401, "Invalid username or password.")
        elif self.role == "read" or repo.partition("/")[0] not in ("me", "team"):
            self._error(403, "You don't have the rights to create a model under this namespace")
        elif repo.partition("/")[2] == "":
            self._error(400, "bad name")
        else:
            return True
        return False

    def _may_read(self, repo: str) -> bool:
        known = self.hub.repos.get(repo)
        own = self.role is not None and repo.partition("/")[0] in ("me", "team")
        if known is None or (known.private and not own):
            # The Hub does not tell strangers whether a private model exists.
            self._error(404 if self.role else 401, "Repository not found", **{"X-Error-Code": "RepoNotFound"})
        elif repo in self.hub.gated and self.role is None:
            self._error(self.hub.gated[repo], "Access is restricted", **{"X-Error-Code": "GatedRepo"})
        else:
            return True
        return False

    def _at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        found = self.hub.repos[repo].at(revision)
        if found is None:
            self._error(404, "Invalid rev id", **{"X-Error-Code": "RevisionNotFound"})
        return found

    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _json(self, data: object, status: int = 200) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(data).encode())

    def _error(self, status: int, message: str, **headers: str) -> None:
        body = json.dumps({"error": message}).encode()
        self._send(status, {"Content-Type": "application/json", "X-Error-Message": message, **headers}, body)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and self.fault.corrupt:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if self.fault is not None and self.fault.cut is not None:
            self.wfile.write(body[: self.fault.cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(body)


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+?)"
_ROUTES: tuple[tuple[str, Any], ...] = (
    (r"GET /api/whoami-v2", _Handler.whoami),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"POST /api/models/{_REPO}/branch/(?P<branch>.+)", _Handler.branch),
    (rf"POST /api/models/{_REPO}/preupload/(?P<revision>.+)", _Handler.preupload),
    (rf"POST /api/models/{_REPO}/commit/(?P<revision>.+)", _Handler.commit),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /storage/(?P<oid>\w+)", _Handler.store),
    (r"POST /storage/(?P<oid>\w+)", _Handler.complete),
    (rf"GET /api/models/{_REPO}(/revision/(?P<revision>.+))?", _Handler.info),
    (rf"GET /api/models/{_REPO}/tree/(?P<revision>[^/]+)", _Handler.tree),
    (rf"(GET|HEAD) /{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
)


def _git_sha(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _oid(name: str, content: bytes) -> str:
    """The name of a content: SHA-256 of large files, as git has it of others."""
    return hashlib.sha256(content).hexdigest() if name.endswith(_LARGE) else _git_sha(content)


def _lfs(name: str, content: bytes, key: str) -> dict[str, Any]:
    if not name.endswith(_LARGE):
        return {}
    return {"lfs": {key: hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}}
