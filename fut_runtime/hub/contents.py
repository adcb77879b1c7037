"""Which files of an artifact's directory go to the Hub: those that belong there, and no other."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fut_runtime.artifact.paths import (
    CARD_FILE,
    FILES_FILE,
    MARKER_FILE,
    REPORT_DATA_FILE,
    REPORT_FILE,
    inside,
    is_shard_name,
)
from fut_runtime.artifact.reader import Artifact
from fut_runtime.errors import ArtifactError
from fut_runtime.hub.card import BENCH_FILE, model_card

#: What goes along with the sealed files where it is there.
_BESIDE = (REPORT_FILE, REPORT_DATA_FILE, BENCH_FILE)
_PLOT = re.compile(r"report/[\w-]+\.png")
#: Names that hold keys or passwords, whoever sealed them.
_SECRET_NAME = re.compile(
    r"\..*|.*\.(pem|key|p12|pfx|kdbx)|id_(rsa|dsa|ecdsa|ed25519)|credentials.*|(hf_?)?token", re.I
)
_SECRET_TEXT = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----")
#: Larger files than tokenizers are not read for secrets.
_MAX_READ_BYTES = 64 << 20


@dataclass(frozen=True)
class UploadFile:
    """A file that goes to the Hub.

    Attributes:
        name: its name there.
        source: where it lies, or its content.
        size: bytes.
        sha256: of the content it was sealed with; None outside the sealed set.
    """

    name: str
    source: Path | bytes
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class UploadContents:
    """What an upload consists of.

    Attributes:
        files: what goes, in order.
        staying: names of files in the directory that do not.
        notes: what the card could not say, see `Card`.
    """

    files: tuple[UploadFile, ...]
    staying: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def upload_contents(
    artifact: Artifact,
    repo: str,
    *,
    card: bool = True,
    base_model: str | None = None,
    license: str | None = None,
    bench: Path | None = None,
) -> UploadContents:
    """The sealed files, report, measurements and model card of an artifact.

    A README.md beside the sealed files is the card; otherwise `model_card` makes one, of the arguments it shares with
    this function. Links are followed inside the directory, and inside the Hub's cache.

    Raises:
        ArtifactError: a file that would go has the name of a secret or holds one, is a link out, or the card cannot be
            made.
    """
    files = [
        UploadFile(name, inside(artifact.path, name), sealed.size, sealed.sha256)
        for name, sealed in sorted(artifact.files.items())
    ]
    files += [_unsealed(artifact, name) for name in (FILES_FILE, MARKER_FILE)]
    present = {p.relative_to(artifact.path).as_posix() for p in artifact.path.rglob("*") if p.is_file()}
    files += [_unsealed(artifact, n) for n in sorted(present) if n in _BESIDE or _PLOT.fullmatch(n)]
    notes: tuple[str, ...] = ()
    if bench is not None:
        files = [f for f in files if f.name != BENCH_FILE] + [UploadFile(BENCH_FILE, bench, bench.stat().st_size)]
    if CARD_FILE in artifact.files:
        notes = (
            f"{CARD_FILE} is the source's card, sealed, so this artifact's own is not uploaded; fut-artifact repack "
            "makes room for it",
        )
    elif card and CARD_FILE in present:
        files.append(_unsealed(artifact, CARD_FILE))
    elif card:
        made = model_card(artifact, repo, base_model=base_model, license=license, bench=bench)
        text, notes = made.text.encode(), made.notes
        files.append(UploadFile(CARD_FILE, text, len(text)))
    for file in files:
        _check_secret(file)
    staying = sorted(present - {file.name for file in files})
    return UploadContents(tuple(files), tuple(staying), notes)


def _unsealed(artifact: Artifact, name: str) -> UploadFile:
    path = inside(artifact.path, name)
    return UploadFile(name, path, path.stat().st_size)


def _check_secret(file: UploadFile) -> None:
    """Refuse what nobody means to publish."""
    parts = PurePosixPath(file.name).parts
    if any(_SECRET_NAME.fullmatch(part) for part in parts):
        raise ArtifactError(f"{file.name}: has the name of a hidden file or of a secret and is not uploaded; remove it")
    if is_shard_name(file.name) or file.size > _MAX_READ_BYTES:
        return
    content = file.source if isinstance(file.source, bytes) else file.source.read_bytes()
    if _SECRET_TEXT.search(content):
        raise ArtifactError(
            f"{file.name}: holds an access token or a private key and is not uploaded; take it out, and make a new one "
            "in its place if anyone may have seen it"
        )
