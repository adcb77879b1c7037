"""Turns an artifact back into an ordinary Hugging Face checkpoint, so that other tools can check its accuracy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fut_runtime.artifact.export_config import exported_config
from fut_runtime.artifact.json_text import canonical
from fut_runtime.artifact.layout import NORM_OF_MODULE, TensorSpec
from fut_runtime.artifact.manifest import Manifest
from fut_runtime.artifact.paths import INDEX_FILE
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.shard_writer import OpenShard
from fut_runtime.artifact.shards import MAX_SHARD_BYTES, TORCH_DTYPES, index_text, plan_shards
from fut_runtime.artifact.spec import MODULES, ModelSpec
from fut_runtime.artifact.staging import StagingDirectory, check_outside, os_errors, write_file
from fut_runtime.errors import ArtifactError, UnsupportedError

#: Option value -> safetensors dtype.
EXPORT_DTYPES: dict[str, str] = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
#: What is exported when nothing is asked for: the first of these that is stored.
FORMAT_PREFERENCE: tuple[str, ...] = ("int4", "e4m3", "bf16")
#: Written into every export, and what allows a later one to replace it.
EXPORT_FILE = "fut_export.json"

_ATTENTION = "self_attn"


@dataclass
class ExportSummary:
    """What an export wrote.

    Attributes:
        path: the checkpoint's directory.
        weight_format: which stored weights it holds.
        dtype: storage type of its tensors.
        nbytes: bytes of tensor data.
        zero_gains: matrices whose norm has gains of exactly zero, and how many: the columns that such a gain multiplies
            cannot be recovered and are zero, which the model does not notice.
    """

    path: Path
    weight_format: str
    dtype: str
    nbytes: int = 0
    zero_gains: dict[str, int] = field(default_factory=dict)


def default_format(manifest: Manifest) -> str:
    """The format that is exported when nothing is asked for."""
    stored = manifest.weights["layers.0.qkv"]
    return next(f for f in FORMAT_PREFERENCE if f in stored)


def export_checkpoint(
    artifact: Artifact,
    out: Path,
    *,
    weight_format: str | None = None,
    dtype: str = "bf16",
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ExportSummary:
    """Write the dequantised weights, config.json and side files as a checkpoint that transformers loads.

    A gain that was folded into a matrix is divided out again, so that the matrix and the norm beside it multiply to
    what the artifact holds.

    Args:
        artifact: where to take them from.
        out: directory to create.
        weight_format: `int4`, `e4m3` or `bf16`; None for the first of these that is stored.
        dtype: `bf16`, `f16` or `f32`. Only `f32` holds every dequantised value exactly.
        overwrite: whether an earlier export in `out` is replaced.
        max_shard_bytes: size limit of a safetensors file.
        progress: told the bytes written and those still to come, after each tensor.

    Raises:
        UnsupportedError: the artifact does not hold that format.
        ArtifactError: `out` exists or holds the artifact, the disk refuses, or a value does not fit `dtype`.
    """
    check_outside(artifact.path, out)
    if dtype not in EXPORT_DTYPES:
        raise UnsupportedError(f"cannot export as {dtype!r}; expected one of {', '.join(EXPORT_DTYPES)}")
    weight_format = weight_format or default_format(artifact.manifest)
    exporter = _Exporter(artifact, weight_format, EXPORT_DTYPES[dtype])
    summary = ExportSummary(out, weight_format, dtype, zero_gains=exporter.zero_gains)
    shards = plan_shards(list(exporter.specs()), max_shard_bytes)
    total = sum(place.spec.nbytes for shard in shards for place in shard.tensors)
    staging = StagingDirectory(out, overwrite=overwrite, replaces=EXPORT_FILE)
    try:
        tensors = exporter.tensors()
        for shard in shards:
            file = OpenShard(shard, staging.path)
            try:
                for place in shard.tensors:
                    name, tensor = next(tensors)
                    assert name == place.spec.name, f"{name} is exported where {place.spec.name} was planned"
                    file.write(place, tensor)
                    summary.nbytes += place.spec.nbytes
                    if progress is not None:
                        progress(summary.nbytes, total)
                with os_errors(file.path, "cannot be flushed"):
                    os.fsync(file.descriptor)
            finally:
                file.close()
        write_file(staging.path / INDEX_FILE, index_text(shards).encode())
        for side_file in artifact.manifest.side_files:
            if side_file != "config.json":
                write_file(staging.path / side_file, artifact.side_file(side_file).read_bytes())
        write_file(staging.path / "config.json", exported_config(artifact, dtype).encode())
        provenance = {
            "artifact_source": artifact.manifest.source,
            "weights": weight_format,
            "dtype": dtype,
            "zero_gain_columns": summary.zero_gains,
        }
        write_file(staging.path / EXPORT_FILE, canonical(provenance).encode())
        summary.path = staging.publish()
    finally:
        staging.abort()
    return summary


def unfold_gain(weight: Tensor, gain: Tensor) -> tuple[Tensor, int]:
    """Divide the gain of the preceding norm out of a matrix that holds it.

    Args:
        weight: f32 [out, in], the product W · diag(gain).
        gain: f32 [in].

    Returns:
        W, with columns of zero where the gain is zero and W cannot be known, and the number of those columns.
    """
    zero = gain == 0
    return torch.where(zero, 0.0, weight / torch.where(zero, 1.0, gain)), int(zero.sum())


class _Exporter:
    """Names, shapes and values of the checkpoint's tensors, in one order for all three."""

    def __init__(self, artifact: Artifact, weight_format: str, dtype: str) -> None:
        self.artifact = artifact
        self.weight_format = weight_format
        self.dtype = dtype
        self.model: ModelSpec = artifact.manifest.model
        self.zero_gains: dict[str, int] = {}

    def specs(self) -> Iterator[TensorSpec]:
        """Every tensor of the checkpoint."""
        model = self.model
        yield self._spec("model.embed_tokens.weight", model.vocab_size, model.hidden_size)
        for layer in range(model.num_layers):
            for _, name, size in self._norms(layer):
                yield self._spec(name, size)
            for module in MODULES:
                cols = model.module_shape(module)[1]
                for part, rows in self._parts(layer, module):
                    yield self._spec(f"{part}.weight", rows, cols)
                if model.module_bias(module):
                    for part, rows in self._parts(layer, module):
                        yield self._spec(f"{part}.bias", rows)
        yield self._spec("model.norm.weight", model.hidden_size)
        if "head" in self.artifact.manifest.weights:
            yield self._spec("lm_head.weight", model.vocab_size, model.hidden_size)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every tensor, in the order of `specs`; one matrix in memory at a time."""
        yield self._cast("model.embed_tokens.weight", self.artifact.tensor("embed"))
        for layer in range(self.model.num_layers):
            for stored, name, _ in self._norms(layer):
                yield self._cast(name, self.artifact.tensor(stored))
            for module in MODULES:
                yield from self._module(layer, module)
        yield self._cast("model.norm.weight", self.artifact.tensor("final_norm"))
        if "head" in self.artifact.manifest.weights:
            yield self._cast("lm_head.weight", self._matrix("head", self.artifact.manifest.head, "final_norm"))

    def _module(self, layer: int, module: str) -> Iterator[tuple[str, Tensor]]:
        name = f"layers.{layer}.{module}"
        norm = NORM_OF_MODULE.get(module)
        weight = self._matrix(name, self.weight_format, norm and f"layers.{layer}.{norm}")
        sizes = [rows for _, rows in self._parts(layer, module)]
        for (part, _), rows in zip(self._parts(layer, module), weight.split(sizes), strict=True):
            yield self._cast(f"{part}.weight", rows)
        if self.model.module_bias(module):
            bias = self.artifact.tensor(f"{name}.bias").split(sizes)
            for (part, _), rows in zip(self._parts(layer, module), bias, strict=True):
                yield self._cast(f"{part}.bias", rows)

    def _matrix(self, name: str, weight_format: str, norm: str | None) -> Tensor:
        weight = self.artifact.dequantized(name, weight_format)
        if norm is None or self.artifact.manifest.weights[name][weight_format].gain != "folded":
            return weight
        stored = self.artifact.tensor(norm)
        # Divide by the gain as the checkpoint will hold it, or its rounding would be left in the product.
        _, gain = self._cast(norm, stored)
        if bool(((gain == 0) & (stored != 0)).any()):
            raise ArtifactError(
                f"{self.artifact.path}: {norm} has gains that {self.dtype} rounds to zero, which would lose columns of "
                f"{name}; export with --dtype f32"
            )
        weight, zeros = unfold_gain(weight, gain.to(torch.float32))
        if zeros:
            self.zero_gains[name] = zeros
        return weight

    def _norms(self, layer: int) -> Iterator[tuple[str, str, int]]:
        """Artifact name, checkpoint name and size of a layer's norm gains."""
        stored, exported = f"layers.{layer}", f"model.layers.{layer}"
        yield f"{stored}.attn_norm", f"{exported}.input_layernorm.weight", self.model.hidden_size
        yield f"{stored}.mlp_norm", f"{exported}.post_attention_layernorm.weight", self.model.hidden_size
        if self.model.qk_norm:
            for part in ("q", "k"):
                yield f"{stored}.{part}_norm", f"{exported}.{_ATTENTION}.{part}_norm.weight", self.model.head_dim

    def _parts(self, layer: int, module: str) -> list[tuple[str, int]]:
        """Checkpoint names and rows of the projections that a module stacks."""
        model, prefix = self.model, f"model.layers.{layer}"
        return {
            "qkv": [
                (f"{prefix}.{_ATTENTION}.q_proj", model.q_size),
                (f"{prefix}.{_ATTENTION}.k_proj", model.kv_size),
                (f"{prefix}.{_ATTENTION}.v_proj", model.kv_size),
            ],
            "o": [(f"{prefix}.{_ATTENTION}.o_proj", model.hidden_size)],
            "gate_up": [
                (f"{prefix}.mlp.gate_proj", model.intermediate_size),
                (f"{prefix}.mlp.up_proj", model.intermediate_size),
            ],
            "down": [(f"{prefix}.mlp.down_proj", model.hidden_size)],
        }[module]

    def _spec(self, name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, self.dtype, shape)

    def _cast(self, name: str, value: Tensor) -> tuple[str, Tensor]:
        result = value.to(TORCH_DTYPES[self.dtype])
        if not bool(torch.isfinite(result).all()):
            raise ArtifactError(
                f"{self.artifact.path}: {name} has values from {float(value.min()):g} to {float(value.max()):g} that "
                f"{self.dtype} cannot hold; export with --dtype f32"
            )
        return name, result
