"""Small synthetic artifacts: random weights in every format, made in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fut_runtime.artifact.fragment import DEFAULT_NIBBLE_ORDER, DEFAULT_SCALE_ORDER
from fut_runtime.artifact.layout import (
    SITES,
    all_tensors,
    default_group_size,
    padded_e4m3_shape,
    padded_int4_shape,
)
from fut_runtime.artifact.manifest import ActivationSpec, KVCacheSpec, Manifest, WeightSpec
from fut_runtime.artifact.shards import TORCH_DTYPES
from fut_runtime.artifact.spec import MODULES, ModelSpec, RopeSpec
from fut_runtime.artifact.writer import ArtifactWriter

#: Sizes that need padding in both directions.
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    hidden_size=72,
    intermediate_size=100,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    vocab_size=50,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
    rope=RopeSpec(theta=10000.0),
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)
_GAINS = {"qkv": "folded", "gate_up": "folded", "head": "folded"}


def weight_spec(
    model: ModelSpec,
    module: str,
    weight_format: str,
    *,
    group_size: int | None = None,
    nibble_order: str = DEFAULT_NIBBLE_ORDER,
    gain: str | None = None,
) -> WeightSpec:
    """How a module is stored in a format, padded as the converter pads."""
    shape = model.module_shape(module)
    paired = module == "gate_up"
    gain = gain or _GAINS.get(module, "none")
    if weight_format != "int4":
        return WeightSpec(
            weight_format,
            shape,
            padded_e4m3_shape(shape),
            "interleave1" if paired else "natural",
            gain,
            scale_dtype="float32" if weight_format == "e4m3" else None,
        )
    group_size = group_size or default_group_size(shape[1])
    return WeightSpec(
        "int4",
        shape,
        padded_int4_shape(shape, group_size, paired),
        "interleave8" if paired else "natural",
        gain,
        group_size=group_size,
        scale_dtype="bfloat16",
        nibble_order=nibble_order,
        scale_order=DEFAULT_SCALE_ORDER,
        method="rtn",
        scale_method="absmax_7",
    )


def make_manifest(
    model: ModelSpec = MODEL,
    *,
    formats: Sequence[str] = ("e4m3", "int4"),
    head: str = "bf16",
    side_files: Sequence[str] = (),
    gain: str | None = None,
) -> Manifest:
    """A manifest that stores every module in `formats`."""
    weights = {
        f"layers.{i}.{module}": {
            f: weight_spec(model, module, f, gain=gain if module in _GAINS else None) for f in formats
        }
        for i in range(model.num_layers)
        for module in MODULES
    }
    if head != "bf16" or not model.tie_word_embeddings:
        weights["head"] = {head: weight_spec(model, "head", head, gain=gain)}
    return Manifest(
        model=model,
        weights=weights,
        kv_cache=KVCacheSpec(),
        activation=ActivationSpec(calibrated=False, margin=1.0),
        head=head,
        source={"kind": "synthetic", "id": "tiny"},
        recipe={"name": "test"},
        tools={"futransformer": "0"},
        side_files=tuple(side_files),
    )


def random_tensors(manifest: Manifest, seed: int = 0) -> dict[str, Tensor]:
    """A tensor of every name in the layout; scales and norms positive, padding not zero (readers must drop it)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in all_tensors(manifest):
        if spec.name.endswith(".int4"):
            words = torch.randint(-(2**31), 2**31, spec.shape, generator=generator).to(torch.int32)
            tensors[spec.name] = words
        elif spec.name == "hadamard":
            tensors[spec.name] = torch.ones(spec.shape, dtype=torch.int8)
        else:
            values = torch.rand(spec.shape, generator=generator) + 0.25
            if spec.name.endswith((".bf16", ".e4m3", "embed")):
                values = values - 0.75
            if spec.name.endswith("_scale") and not spec.name.endswith("activation_scale"):
                values = values / 16
            tensors[spec.name] = values.to(TORCH_DTYPES[spec.dtype])
    assert len(SITES) == 4
    return tensors


def write_artifact(
    out: Path,
    manifest: Manifest | None = None,
    *,
    tensors: dict[str, Tensor] | None = None,
    side_files: dict[str, bytes] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> Path:
    """Write a sealed artifact of random weights."""
    side_files = side_files or {}
    manifest = replace(manifest or make_manifest(), side_files=tuple(sorted(side_files)))
    tensors = tensors or random_tensors(manifest)
    with ArtifactWriter(out, manifest, max_shard_bytes=max_shard_bytes, overwrite=overwrite) as writer:
        for spec in all_tensors(manifest):
            writer.write(spec.name, tensors[spec.name])
        for name, content in side_files.items():
            writer.copy_side_file(content, name)
        return writer.seal()
