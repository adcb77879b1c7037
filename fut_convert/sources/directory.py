"""A Hugging Face checkpoint directory: safetensors or `pytorch_model.bin`, single or sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from fut_convert.errors import CheckpointError, ReadError, UnsupportedModelError
from fut_convert.sources.base import Problem, SideFile, Source, TensorInfo
from fut_convert.sources.config import model_spec
from fut_convert.sources.file_kinds import (
    SAFETENSORS_INDEX,
    SAFETENSORS_SINGLE,
    TORCH_INDEX,
    TORCH_SINGLE,
    WEIGHT_ENTRIES,
    is_side_file,
    missing_companions,
    weight_entries,
)
from fut_convert.sources.grouped_codes import Packing
from fut_convert.sources.names import HEAD
from fut_convert.sources.quantized_formats import plain_config, stored_format
from fut_convert.sources.quantized_matrices import QuantizedMatrices
from fut_convert.sources.safetensors_file import SafetensorsFile
from fut_convert.sources.safetensors_header import SafetensorsReader
from fut_convert.sources.torch_file import TorchFile
from fut_runtime.artifact.json_text import excerpt, strict_json
from fut_runtime.artifact.paths import plain_name
from fut_runtime.artifact.spec import ModelSpec

#: Nothing but a damaged or hostile file is larger.
_MAX_JSON_BYTES = 100_000_000

WeightFile = SafetensorsReader | TorchFile


class DirectorySource(Source):
    """An open checkpoint directory. `identity` overrides what is recorded about its origin (the Hub does).

    Raises:
        CheckpointError: no checkpoint, an unsafe or unreadable file, or a contradictory config.
        UnsupportedModelError: a model that cannot be converted.
    """

    def __init__(self, root: Path, identity: dict[str, Any] | None = None) -> None:
        self._root = self.location = root.resolve()
        identity = identity or {"kind": "directory", "name": plain_name(self._root.name or str(self._root))}
        self._name = str(identity.get("id") or identity["name"])
        self._refuse_other_contents()
        config = read_json_object(self._contained("config.json"), f"{self._name}: config.json")
        generation = self._json_file("generation_config.json")
        quantized = stored_format(config, self._json_file, self._name)
        spec = model_spec(plain_config(config), generation, self._name)
        self._files: dict[str, WeightFile] = {}
        self._problems: list[Problem] = []
        try:
            tensors = self._open_weights()
        except BaseException:
            self.close()
            raise
        self._matrices: QuantizedMatrices | None = None
        if quantized is not None:
            self._matrices = QuantizedMatrices(quantized, tensors, self._read, self._name)
            tensors = self._matrices.tensors
            self.quantized = self._matrices.names
            self.readable_dtypes = self.readable_dtypes | {quantized.title}
        self._warn_about(config)
        super().__init__(identity, _resolve_tied(spec, config, tensors), tensors)

    def side_files(self) -> list[SideFile]:
        return [(name, self._contained(name)) for name in self._side_file_names()]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def weight_files(self) -> list[str]:
        return sorted(self._files)

    def packing(self, name: str) -> Packing | None:
        return self._matrices.packing(name) if self._matrices is not None and name in self.quantized else None

    def load_codes(self, name: str, group_size: int, columns: int) -> tuple[Tensor, Tensor]:
        if self._matrices is None:
            return super().load_codes(name, group_size, columns)
        return self._matrices.codes(name, group_size, columns)

    def _read(self, info: TensorInfo) -> Tensor:
        return self._files[info.file].read(info)

    def _read_rows(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        if self._matrices is not None and info.name in self.quantized:
            return self._matrices.weight(info.name)[start:stop]
        return self._files[info.file].read_rows(info, start, stop)

    def _is_harmless(self, info: TensorInfo) -> bool:
        return super()._is_harmless(info) or (self._matrices is not None and self._matrices.zero_bias(info))

    def _reported(self) -> Collection[str]:
        return () if self._matrices is None else self._matrices.broken

    def _file_problems(self) -> list[Problem]:
        problems = [problem for file in self._files.values() for problem in file.problems]
        missing = missing_companions(self._side_file_names())
        if self._matrices is not None:
            # Of a truncated file nothing need be read to refuse it.
            problems += self._matrices.problems + ([] if problems else self._matrices.check())
        return problems + self._problems + [Problem("warning", f"{self._name}: {text}") for text in missing]

    def _json_file(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the checkpoint that need not be there."""
        return (
            read_json_object(self._contained(name), f"{self._name}: {name}") if (self._root / name).exists() else None
        )

    def _side_file_names(self) -> list[str]:
        paths = [p for p in (*self._root.glob("*"), *self._root.glob("*/*")) if p.is_file()]
        return sorted(n for n in (p.relative_to(self._root).as_posix() for p in paths) if is_side_file(n))

    def _refuse_other_contents(self) -> None:
        if not self._root.is_dir():
            raise CheckpointError(f"{self._root}: not a directory")
        names = self._top_names()
        if "fut_config.json" in names:
            raise CheckpointError(f"{self._name}: is a converted artifact already, not a checkpoint")
        if "adapter_config.json" in names and not names.intersection(WEIGHT_ENTRIES):
            raise UnsupportedModelError(
                f"{self._name}: holds a LoRA adapter, not a whole model; merge it into its base model first "
                "(peft's merge_and_unload) and save that"
            )
        gguf = sorted(name for name in names if name.endswith(".gguf"))
        if gguf and not names.intersection(WEIGHT_ENTRIES):
            raise CheckpointError(f"{self._name}: holds GGUF files; give the path of one of them, such as {gguf[0]}")
        if "config.json" not in names:
            if "params.json" in names:
                raise UnsupportedModelError(
                    f"{self._name}: is in Meta's or Mistral's own format (params.json); "
                    "take the Hugging Face version of the model (config.json and model*.safetensors)"
                )
            raise CheckpointError(f"{self._name}: no config.json, so not a Hugging Face checkpoint")

    def _open_weights(self) -> dict[str, TensorInfo]:
        present = weight_entries(self._top_names())
        if not present:
            raise CheckpointError(f"{self._name}: no weights; expected one of {', '.join(WEIGHT_ENTRIES)}")
        entry = present[0]
        safe = [name for name in present if name in (SAFETENSORS_SINGLE, SAFETENSORS_INDEX)]
        if len(safe) > 1:
            self._problems.append(
                Problem(
                    "warning",
                    f"{self._name}: both {' and '.join(safe)} exist; {entry} is read, as transformers does",
                )
            )
        self._pickled = entry in (TORCH_SINGLE, TORCH_INDEX)
        if entry not in (SAFETENSORS_INDEX, TORCH_INDEX):
            file = self._files[entry] = self._open_file(entry)
            return dict(file.tensors)
        return self._open_indexed(entry)

    def _top_names(self) -> set[str]:
        """Names of the files and directories at the top of the checkpoint."""
        return {path.name for path in self._root.iterdir()}

    def _open_file(self, name: str) -> WeightFile:
        """Open a file of weights."""
        path = self._contained(name)
        return TorchFile(path, name) if self._pickled else SafetensorsFile(path, name)

    def _open_indexed(self, index: str) -> dict[str, TensorInfo]:
        """Open the files that an index names, and no other that may lie about."""
        where = f"{self._name}: {index}"
        files = weight_map(read_json_object(self._contained(index), where), where)
        for name in sorted(set(files.values())):
            self._files[name] = self._open_file(name)
        tensors: dict[str, TensorInfo] = {}
        for tensor, file in files.items():
            info = self._files[file].tensors.get(tensor)
            if info is None:
                self._problems.append(Problem("error", f"{where}: says that {file} holds {tensor}, but it does not"))
            else:
                tensors[tensor] = info
        for opened in self._files.values():
            for tensor, info in opened.tensors.items():
                if files.get(tensor) != opened.name:
                    self._problems.append(
                        Problem(
                            "error", f"{opened.name}: holds {tensor} {list(info.shape)}, which {index} does not say"
                        )
                    )
        return tensors

    def _contained(self, name: str) -> Path:
        """Path of a file of the checkpoint, refused when it leads out of it.

        Raises:
            CheckpointError: an absolute name, one with `..`, a link out of the directory, or no such file.
        """
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or not pure.parts:
            raise CheckpointError(
                f"{self._name}: refused to follow the file name {excerpt(name)}, which leads out of it"
            )
        path = self._root / pure
        try:
            target, there = path.resolve(), path.is_file()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, a link to itself
            raise CheckpointError(f"{self._name}: {excerpt(name)} is no name of a file ({error})") from error
        allowed = [self._root]
        if self._root.parent.name == "snapshots":
            # The Hub's cache keeps files once, by hash, and links to them from each revision.
            allowed.append(self._root.parent.parent / "blobs")
        if not any(target.is_relative_to(folder) for folder in allowed):
            raise CheckpointError(
                f"{self._name}: {name} is a link that leads out of the checkpoint; put the file itself there"
            )
        if not there:
            raise CheckpointError(f"{self._name}: {name} is missing; the download is incomplete")
        return path

    def _warn_about(self, config: dict[str, Any]) -> None:
        if config.get("auto_map"):
            self._problems.append(
                Problem(
                    "warning",
                    f"{self._name}: config.json: auto_map points to code in the checkpoint; it is neither executed nor "
                    "copied, and the model is taken for an ordinary one of its architecture, as transformers does",
                )
            )


def read_json_object(path: Path, where: str) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Raises:
        CheckpointError: it cannot be read, is not JSON, or holds something else.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{where}: has {size} bytes, expected at most {_MAX_JSON_BYTES}; the file is damaged")
        data = strict_json(path.read_bytes(), constants=True)
    except OSError as error:
        raise ReadError(f"{where}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: holds a {type(data).__name__}, expected an object")
    return data


def weight_map(index: Mapping[str, Any], where: str) -> dict[str, str]:
    """Tensor -> file, from the contents of an index.

    Raises:
        CheckpointError: it is something else.
    """
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{where}: weight_map is not an object of file names")
    # One file may be named with and without `./`.
    return {tensor: str(PurePosixPath(file)) if file else file for tensor, file in files.items()}


def _resolve_tied(spec: ModelSpec, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> ModelSpec:
    """A config silent about tying, and no head in the files: then the embedding is the head."""
    if HEAD not in tensors and config.get("tie_word_embeddings") is None:
        return replace(spec, tie_word_embeddings=True)
    return spec
