"""A GGUF model: tensors renamed, q and k rows put back in order, blocks dequantized to float32."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fut_convert.errors import CheckpointError
from fut_convert.sources.base import Problem, SideFile, Source, TensorInfo
from fut_convert.sources.config import model_spec
from fut_convert.sources.gguf_config import hugging_face_config
from fut_convert.sources.gguf_file import READABLE_TYPES, GGUFFile, GGUFTensor
from fut_convert.sources.gguf_tokenizer import tokenizer_files

_OUTER_NAMES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: dict[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

#: Frequency factors of Llama 3; they end up in the config.
_ROPE_FACTORS = "rope_freqs.weight"

#: More than half the channels of any head.
_MOST_FREQUENCIES = 4096

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFSource(Source):
    """An open GGUF model; of one that is split into parts, give any of them.

    Raises:
        CheckpointError: a damaged file, or a part that is missing.
        UnsupportedModelError: a model or tokenizer that cannot be converted.
    """

    readable_dtypes = READABLE_TYPES

    def __init__(self, path: Path) -> None:
        self.location = path
        self._files: dict[str, GGUFFile] = {}
        try:
            first = self._open_parts(path)
            self._stored: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
            for file in self._files.values():
                for tensor in file.tensors.values():
                    self._stored[hugging_face_name(tensor.name)] = (file, tensor)
            factors = self._stored.pop(_ROPE_FACTORS, None)
            shapes = {name: tensor.shape for name, (_, tensor) in self._stored.items()}
            self._config, self._generation = hugging_face_config(
                first.metadata,
                shapes,
                None if factors is None else _rope_factors(*factors),
                first.name,
            )
            spec = model_spec(self._config, self._generation, first.name)
            self._tokenizer_files = tokenizer_files(first.metadata, spec.max_position_embeddings, first.name)
        except BaseException:
            self.close()
            raise
        # llama.cpp rotates neighbouring channels in `llama` models, so their q and k rows were reordered.
        self._reordered = first.metadata["general.architecture"] == "llama"
        super().__init__(
            _identity(first),
            spec,
            {
                name: TensorInfo(name, tensor.type, tensor.shape, tensor.nbytes, file.name)
                for name, (file, tensor) in self._stored.items()
            },
        )

    def side_files(self) -> list[SideFile]:
        files = {
            "config.json": _json_bytes(self._config),
            "generation_config.json": _json_bytes(self._generation),
            **self._tokenizer_files,
        }
        return sorted(files.items())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _weight_paths(self) -> Iterable[tuple[str, Path]]:
        return ((file.name, self.location.parent / name) for name, file in self._files.items())

    def _read_rows(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        file, tensor = self._stored[info.name]
        if not self._reordered or not info.name.endswith(
            (".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")
        ):
            return file.read_rows(tensor, start, stop)
        # Rows are reordered within a head, so whole heads are read around those asked for.
        head_dim = self.spec.head_dim
        first = start // head_dim * head_dim
        last = min(-(-stop // head_dim) * head_dim, info.shape[0])
        rows = restore_head_rows(file.read_rows(tensor, first, last), head_dim)
        return rows[start - first : stop - first].clone() if (first, last) != (start, stop) else rows

    def _file_problems(self) -> list[Problem]:
        problems = [problem for file in self._files.values() for problem in file.problems]
        first = next(iter(self._files.values()))
        if "tokenizer.chat_template" not in first.metadata:
            problems.append(Problem("warning", f"{first.name}: holds no chat template"))
        count = len(first.metadata["tokenizer.ggml.tokens"])
        if count != self.spec.vocab_size:
            severity = "error" if count > self.spec.vocab_size else "warning"
            problems.append(
                Problem(severity, f"{first.name}: {count} tokens for an embedding of {self.spec.vocab_size} rows")
            )
        return problems

    def _open_parts(self, path: Path) -> GGUFFile:
        """Open the file, or all parts of a split one; returns the first, which holds the metadata."""
        match = _PART.fullmatch(path.name)
        names = [path.name]
        if match:
            count = int(match[3])
            names = [f"{match[1]}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]
        for name in names:
            if not (path.parent / name).is_file():
                raise CheckpointError(f"{path.name}: its part {name} is missing; all {len(names)} are needed")
            self._files[name] = GGUFFile(path.parent / name)
        first = self._files[names[0]]
        declared = first.metadata.get("split.count", 0)
        if declared > 1 and declared != len(names):
            raise CheckpointError(
                f"{path.name}: is one of {declared} parts, but its name does not say which "
                f"(expected NAME-00001-of-{declared:05d}.gguf); keep the names the parts were published with"
            )
        return first


def hugging_face_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; an unknown name stays as it is."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER_NAMES[stem]}.{kind}" if stem in _OUTER_NAMES else name


def restore_head_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Undo the reordering of q and k rows: within a head, rows 2i and 2i + 1 were i and i + head_dim / 2.

    Args:
        rows: [heads * head_dim, ...].
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _rope_factors(file: GGUFFile, tensor: GGUFTensor) -> list[float]:
    """`rope_freqs.weight`, one factor a frequency.

    Raises:
        CheckpointError: it has another shape than any model's, or a value that is no factor.
    """
    if len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FREQUENCIES:
        raise CheckpointError(f"{file.name}: {tensor.name} has shape {list(tensor.shape)}, expected [head_dim / 2]")
    factors = file.read_rows(tensor, 0, tensor.shape[0]).float()
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise CheckpointError(f"{file.name}: {tensor.name} holds a factor that is not a positive number")
    values: list[float] = factors.tolist()
    return values


def _identity(file: GGUFFile) -> dict[str, Any]:
    identity: dict[str, Any] = {"kind": "gguf", "name": file.name}
    for key in ("name", "license"):
        value = file.metadata.get(f"general.{key}")
        if isinstance(value, str):
            identity["model" if key == "name" else key] = value
    return identity


def _json_bytes(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()
