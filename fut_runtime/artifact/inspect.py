"""What an artifact holds and what it weighs, as plain data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from fut_runtime.artifact.json_text import parse_object
from fut_runtime.artifact.paths import REPORT_DATA_FILE, REPORT_FILE
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.seal import read_marker, read_small
from fut_runtime.errors import ArtifactError

#: Ends of the names of tensors that hold a matrix -> weight format.
_FORMAT_OF_SUFFIX = {
    "e4m3": "e4m3",
    "e4m3_scale": "e4m3",
    "int4": "int4",
    "int4_scale": "int4",
    "bf16": "bf16",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TensorRow:
    """One line of the table: a tensor, or one tensor of several layers that are stored alike.

    Attributes:
        name: `layers.{i}.qkv.int4`, or `layers.{first}-{last}.qkv.int4` for several layers.
        dtype, shape: as stored.
        count: how many tensors the line stands for.
        nbytes: bytes of all of them.
        file: shard that holds it, or the first of several.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nbytes: int
    file: str


@dataclass(frozen=True)
class FormatTotal:
    """Bytes of all matrices stored in one format.

    Attributes:
        name: `int4`, `e4m3`, `bf16`, `embedding`, or `norms, biases and scales`.
        weights: true number of weights (padding not counted).
        nbytes: bytes including padding and scales.
    """

    name: str
    weights: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for every true weight."""
        return 8 * self.nbytes / self.weights if self.weights else math.nan


def tensor_rows(artifact: Artifact, *, every: bool = False) -> list[TensorRow]:
    """The tensors in file order; without `every`, those that all layers store alike are one line."""
    rows = [
        TensorRow(p.spec.name, p.spec.dtype, p.spec.shape, 1, p.spec.nbytes, shard)
        for shard, places in artifact.shards.items()
        for p in places
    ]
    if every:
        return rows
    groups: dict[tuple[str, str, tuple[int, ...]], list[TensorRow]] = {}
    for row in rows:
        match = _LAYER.fullmatch(row.name)
        groups.setdefault((match[2] if match else row.name, row.dtype, row.shape), []).append(row)
    return [_merged(group) for group in groups.values()]


def _merged(rows: list[TensorRow]) -> TensorRow:
    first = rows[0]
    layers = [int(match[1]) for row in rows if (match := _LAYER.fullmatch(row.name))]
    name = first.name
    if len(layers) > 1:
        run = layers == list(range(layers[0], layers[-1] + 1))
        which = f"{layers[0]}-{layers[-1]}" if run else ",".join(map(str, layers))
        name = _LAYER.sub(rf"layers.{which}.\2", first.name)
    return TensorRow(name, first.dtype, first.shape, len(rows), sum(row.nbytes for row in rows), first.file)


def format_totals(artifact: Artifact) -> list[FormatTotal]:
    """Bytes and true weights of each weight format, the embedding, and everything small."""
    weights: dict[str, int] = {}
    for formats in artifact.manifest.weights.values():
        for stored in formats.values():
            weights[stored.format] = weights.get(stored.format, 0) + math.prod(stored.shape)
    nbytes = dict.fromkeys(weights, 0)
    embedding = small = 0
    for places in artifact.shards.values():
        for spec in (place.spec for place in places):
            weight_format = _FORMAT_OF_SUFFIX.get(spec.name.rpartition(".")[2])
            if weight_format is not None:
                nbytes[weight_format] += spec.nbytes
            elif spec.name == "embed":
                embedding += spec.nbytes
            else:
                small += spec.nbytes
    model = artifact.manifest.model
    return [
        *(FormatTotal(f, weights[f], nbytes[f]) for f in ("int4", "e4m3", "bf16") if f in weights),
        FormatTotal("embedding", model.vocab_size * model.hidden_size, embedding),
        FormatTotal("norms, biases and scales", 0, small),
    ]


def report_of(artifact: Artifact) -> str | None:
    """The conversion's report beside the sealed files, or None; says so where it is about another artifact.

    The report is no part of the sealed set. That it belongs here it shows by the hash of the list of files.
    """
    if not (artifact.path / REPORT_FILE).is_file():
        return None
    try:
        data = parse_object(read_small(artifact.path, REPORT_DATA_FILE), REPORT_DATA_FILE)
    except ArtifactError:
        return f"{REPORT_FILE} (its data, {REPORT_DATA_FILE}, cannot be read)"
    if data.get("files_sha256") != read_marker(artifact.path):
        return f"{REPORT_FILE} (of another artifact: it names other hashes)"
    return REPORT_FILE


def summary(artifact: Artifact) -> dict[str, Any]:
    """Everything `fut-artifact inspect --json` prints."""
    manifest = artifact.manifest
    return {
        "path": str(artifact.path),
        "format_version": manifest.format_version,
        "model": manifest.model.to_dict(),
        "source": manifest.source,
        "recipe": manifest.recipe,
        "calibrated": manifest.activation.calibrated,
        "kv_cache": {
            "bits": manifest.kv_cache.bits,
            "rotation": manifest.kv_cache.rotation,
            "zero_point": manifest.kv_cache.zero_point,
            "v_folded": manifest.kv_cache.v_folded,
        },
        "head": manifest.head,
        "side_files": sorted(manifest.side_files),
        "report": report_of(artifact),
        "files": {name: {"bytes": f.size, "sha256": f.sha256} for name, f in sorted(artifact.files.items())},
        "total_bytes": sum(f.size for f in artifact.files.values()),
        "formats": [
            {
                "name": t.name,
                "weights": t.weights,
                "bytes": t.nbytes,
                "bits_per_weight": round(t.bits_per_weight, 4) if t.weights else None,
            }
            for t in format_totals(artifact)
        ],
        "tensors": [
            {"name": r.name, "dtype": r.dtype, "shape": list(r.shape), "bytes": r.nbytes, "file": r.file}
            for r in tensor_rows(artifact, every=True)
        ],
    }
