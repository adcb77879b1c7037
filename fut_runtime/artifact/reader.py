"""Opens a sealed artifact and gives its tensors, stored or decoded."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fut_runtime.artifact.fragment import dequantize_int4, unpack_codes, unpack_scales
from fut_runtime.artifact.hashing import FileHash, hash_bytes
from fut_runtime.artifact.json_text import parse_object
from fut_runtime.artifact.layout import TensorSpec, all_tensors, weight_tensors
from fut_runtime.artifact.manifest import Manifest, WeightSpec
from fut_runtime.artifact.paths import INDEX_FILE, MANIFEST_FILE, inside, is_shard_name
from fut_runtime.artifact.rows import to_natural_rows
from fut_runtime.artifact.seal import read_files, read_marker, read_small
from fut_runtime.artifact.shards import TORCH_DTYPES, TensorPlace, read_header
from fut_runtime.errors import ArtifactError, UnsupportedError


@dataclass(frozen=True)
class StoredWeight:
    """One matrix as it is stored.

    Attributes:
        spec: how it is stored.
        data: E4M3 or BF16 [rows, cols], or INT4 words int32 [rows/16, cols/64, 32, 4].
        scale: E4M3: F32 [rows]; INT4: BF16 or FP16 [rows/16, cols/group, 16]; BF16: None.
    """

    spec: WeightSpec
    data: Tensor
    scale: Tensor | None


class Artifact:
    """A sealed artifact, opened for reading.

    Attributes:
        path: its directory.
        manifest: its `fut_config.json`.
        files: size and hashes of every sealed file.
        shards: tensors of each shard file and where they lie.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        files: dict[str, FileHash],
        shards: dict[str, list[TensorPlace]],
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.files = files
        self.shards = shards
        self._places = {place.spec.name: (name, place) for name, places in shards.items() for place in places}
        self._mapped: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = False) -> Artifact:
        """Open an artifact, checking everything that costs no read of the shards' data.

        That is: the marker, the hash of every file but the shards, the shards' sizes, and their headers against the
        tensors that the manifest asks for.

        Args:
            path: directory that `fut-convert` wrote.
            verify: also read and hash the shards.

        Raises:
            ArtifactError: not an artifact, not sealed, a newer format, or anything missing, changed or damaged.
        """
        path = Path(path)
        files = read_files(path, read_marker(path))
        manifest = read_manifest(path, files)
        check_listed_files(path, manifest, files)
        shards = {name: read_header(inside(path, name)) for name in sorted(files) if is_shard_name(name)}
        check_tensors(path, manifest, shards)
        check_index(path, shards)
        if verify:
            from fut_runtime.artifact.verify import verify_artifact

            findings = verify_artifact(path).findings
            if findings:
                raise ArtifactError(f"{path}: {findings[0].message} ({len(findings)} findings in all)")
        return cls(path, manifest, files, shards)

    def has(self, name: str) -> bool:
        """Whether the artifact holds a tensor of that name."""
        return name in self._places

    def spec(self, name: str) -> TensorSpec:
        """Storage type and shape of a tensor."""
        return self._place(name)[1].spec

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored, on the CPU, mapped from its file: pages are read when they are first used.

        Raises:
            ArtifactError: no such tensor, or its file cannot be read.
        """
        shard, place = self._place(name)
        if shard not in self._mapped:
            self._mapped[shard] = self._map(shard)
        raw = torch.frombuffer(self._mapped[shard], dtype=torch.uint8, offset=place.offset, count=place.spec.nbytes)
        dtype = TORCH_DTYPES[place.spec.dtype]
        if place.offset % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(place.spec.shape)

    def release_pages(self) -> None:
        """Give back the memory of all pages that were read. Tensors stay valid: they are read again when used."""
        for mapped in self._mapped.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def weight(self, name: str, weight_format: str) -> StoredWeight:
        """A matrix as stored.

        Args:
            name: `layers.{i}.{module}` or `head`.
            weight_format: `e4m3`, `int4` or `bf16`.

        Raises:
            UnsupportedError: the artifact does not hold the matrix in that format.
        """
        formats = self.manifest.weights.get(name, {})
        if weight_format not in formats:
            held = f"stored as {', '.join(sorted(formats))}" if formats else "not stored"
            raise UnsupportedError(f"{self.path}: {name} is {held}, not as {weight_format}; convert with that format")
        spec = formats[weight_format]
        data, *scale = (self.tensor(t.name) for t in weight_tensors(name, spec))
        return StoredWeight(spec, data, scale[0] if scale else None)

    def codes_and_scales(self, name: str, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """INT4 codes uint8 [N, K_padded] in 0..15 and scales [N, K_padded / g], in natural row order.

        They are unpacked on `device`: a card is quicker at it, and half the bytes go there.

        Raises:
            UnsupportedError: the matrix is not stored as INT4.
        """
        stored = self.weight(name, "int4")
        spec = stored.spec
        assert spec.nibble_order is not None and spec.scale_order is not None and stored.scale is not None
        codes = unpack_codes(stored.data.to(device), spec.nibble_order)
        scales = unpack_scales(stored.scale.to(device), spec.scale_order)
        rows = spec.shape[0]
        return to_natural_rows(codes, spec.row_order, rows), to_natural_rows(scales, spec.row_order, rows)

    def dequantized(self, name: str, weight_format: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A matrix [N, K] of true shape in natural row order: computed in FP32, then cast. A folded gain stays in it.

        Raises:
            UnsupportedError: the artifact does not hold the matrix in that format.
        """
        if weight_format == "int4":
            spec = self.weight(name, "int4").spec
            codes, scales = self.codes_and_scales(name)
            return dequantize_int4(codes, scales)[:, : spec.shape[1]].to(dtype).contiguous()
        stored = self.weight(name, weight_format)
        values = stored.data.to(torch.float32)
        if stored.scale is not None:
            values *= stored.scale[:, None]
        rows, cols = stored.spec.shape
        return to_natural_rows(values, stored.spec.row_order, rows)[:, :cols].to(dtype).contiguous()

    def side_file(self, name: str) -> Path:
        """Path of a side file of the checkpoint (`tokenizer.json`, `config.json`, …).

        Raises:
            ArtifactError: the artifact has none of that name.
        """
        if name not in self.manifest.side_files:
            raise ArtifactError(f"{self.path}: has no side file {name!r}; it has {sorted(self.manifest.side_files)}")
        return inside(self.path, name)

    def _map(self, shard: str) -> mmap.mmap:
        path = inside(self.path, shard)
        try:
            with path.open("rb") as file:
                # Private pages that could be written: torch takes no others without a warning.
                return mmap.mmap(file.fileno(), self.files[shard].size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{path}: cannot be mapped into memory ({error}); see that it is still there"
            ) from error

    def _place(self, name: str) -> tuple[str, TensorPlace]:
        try:
            return self._places[name]
        except KeyError:
            raise ArtifactError(f"{self.path}: has no tensor {name!r}") from None


def read_manifest(path: Path, files: dict[str, FileHash]) -> Manifest:
    """The manifest, once its bytes are those that were sealed; ArtifactError otherwise."""
    text = read_small(path, MANIFEST_FILE)
    check_content(path, MANIFEST_FILE, text, files[MANIFEST_FILE])
    return Manifest.from_json(text, str(path / MANIFEST_FILE))


def check_listed_files(path: Path, manifest: Manifest, files: dict[str, FileHash]) -> None:
    """Every sealed file has its size, every one but the shards its hash, and every side file is sealed."""
    missing = sorted(set(manifest.side_files) - set(files))
    if missing:
        raise ArtifactError(f"{path}: side files {missing} are not sealed; the artifact was put together wrongly")
    for name, expected in files.items():
        place = inside(path, name)
        if not place.is_file():
            raise ArtifactError(f"{place}: is missing; fetch the artifact again, or convert the model again")
        size = place.stat().st_size
        if size != expected.size:
            raise ArtifactError(
                f"{place}: {size} bytes, expected {expected.size}; the file is truncated or was changed: "
                "fetch the artifact again"
            )
        if not is_shard_name(name):
            check_content(path, name, place.read_bytes(), expected)


def check_content(path: Path, name: str, data: bytes, expected: FileHash) -> None:
    """The content of a small file is what was sealed; ArtifactError otherwise."""
    found = hash_bytes(data).sha256
    if found != expected.sha256:
        raise ArtifactError(
            f"{path / name}: SHA-256 is {found}, expected {expected.sha256}; the file was changed: "
            "fetch the artifact again"
        )


def check_tensors(path: Path, manifest: Manifest, shards: dict[str, list[TensorPlace]]) -> None:
    """The shards hold exactly the tensors that the manifest asks for, each once; ArtifactError otherwise."""
    expected = {spec.name: spec for spec in all_tensors(manifest)}
    seen: dict[str, str] = {}
    for shard, places in shards.items():
        for place in places:
            found = place.spec
            where = f"{path / shard}: tensor {found.name!r}"
            if found.name in seen:
                raise ArtifactError(f"{where} is also in {seen[found.name]}, expected once")
            seen[found.name] = shard
            wanted = expected.get(found.name)
            if wanted is None:
                raise ArtifactError(f"{where} is not in the manifest; the artifact was put together wrongly")
            if found != wanted:
                raise ArtifactError(
                    f"{where} is {found.dtype} {list(found.shape)}, expected {wanted.dtype} {list(wanted.shape)} "
                    "from the manifest"
                )
    missing = [name for name in expected if name not in seen]
    if missing:
        raise ArtifactError(f"{path}: no shard holds tensor {missing[0]} ({len(missing)} missing); fetch it again")


def check_index(path: Path, shards: dict[str, list[TensorPlace]]) -> None:
    """The index maps every tensor to the shard that holds it; ArtifactError otherwise."""
    where = str(path / INDEX_FILE)
    found = parse_object(read_small(path, INDEX_FILE), where).get("weight_map")
    expected = {place.spec.name: shard for shard, places in shards.items() for place in places}
    if found != expected:
        raise ArtifactError(f"{where}: weight_map is not that of the shards; the artifact was put together wrongly")
