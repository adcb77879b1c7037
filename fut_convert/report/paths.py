"""The checkpoint and the ways an artifact computes, as `StreamedPath`s: what the report compares."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fut_convert.checkpoint_model import lazy_layer_from_checkpoint
from fut_convert.report.wording import FORMAT_NAMES
from fut_convert.sources import Source
from fut_convert.sources.names import EMBEDDING, FINAL_NORM, HEAD
from fut_runtime.artifact.manifest import KVCacheSpec
from fut_runtime.artifact.reader import Artifact
from fut_runtime.evaluate.streamed import StreamedPath
from fut_runtime.reference.model import ReferenceModel
from fut_runtime.reference.numerics import EXACT, Numerics
from fut_runtime.reference.projection import Projection
from fut_runtime.reference.weights import WeightLoader

_BF16_CACHE = KVCacheSpec(bits=16, rotation=False, zero_point=False)
#: The first of these that is stored is what decoding computes with.
_DECODE_PREFERENCE = ("int4", "e4m3", "bf16")


@dataclass(frozen=True)
class NamedPath:
    """A path with what a reader should know of it: which weights and activations, and which KV cache decoding uses."""

    name: str
    path: StreamedPath
    cache: str


def checkpoint_path(source: Source, device: torch.device, numerics: Numerics) -> StreamedPath:
    """The checkpoint's own weights, nothing quantised."""
    spec, load = source.spec, source.load
    return StreamedPath(
        spec=spec, protocol="prefill", numerics=numerics, kv_cache=_BF16_CACHE,
        prefill=lambda index: lazy_layer_from_checkpoint(spec, load, index, device=device),
    )  # fmt: skip


def checkpoint_head(source: Source, device: torch.device, numerics: Numerics) -> ReferenceModel:
    """The checkpoint without its layers: for logits."""
    head = source.load(EMBEDDING if source.spec.tie_word_embeddings else HEAD).to(device, torch.float32)
    projection = Projection(head, gain=source.load(FINAL_NORM).float().to(device))
    return ReferenceModel(source.spec, head, (), (), projection, _BF16_CACHE, numerics)


def artifact_head(artifact: Artifact, device: torch.device) -> ReferenceModel:
    """The artifact without its layers: for logits, with all roundings."""
    head = WeightLoader(artifact, device, resident=True).head()
    manifest = artifact.manifest
    return ReferenceModel(manifest.model, torch.empty(0, device=device), (), (), head, manifest.kv_cache, EXACT)


def depth_paths(artifact: Artifact, device: torch.device) -> list[NamedPath]:
    """Decoding and prefill as the artifact is meant to be run."""
    make = _Paths(artifact, device)
    paths = [make.decode(make.decode_format, make.cache)]
    if "e4m3" in make.stored:
        paths.append(make.eight_bit("prefill"))
    return paths


def accuracy_paths(artifact: Artifact, device: torch.device) -> list[NamedPath]:
    """Everything the artifact can be run as, by the protocols `prefill`, `decode` and `serve`."""
    make = _Paths(artifact, device)
    paths = [make.eight_bit("prefill")] if "e4m3" in make.stored else []
    paths += [make.decode(f, _BF16_CACHE) for f in ("bf16", "e4m3", "int4") if f in make.stored]
    if make.cache.bits == 4:
        paths.append(make.decode(make.decode_format, make.cache))
    if "e4m3" in make.stored:
        paths.append(make.eight_bit("serve"))
    sixteen = next((f for f in ("bf16", "e4m3") if f in make.stored), None)
    if sixteen is not None:
        paths.append(make.sixteen_bit_serve(sixteen))
    return paths


class _Paths:
    def __init__(self, artifact: Artifact, device: torch.device) -> None:
        self.loader = WeightLoader(artifact, device, resident=False)
        self.spec = artifact.manifest.model
        self.cache = artifact.manifest.kv_cache
        self.stored = artifact.manifest.weights["layers.0.qkv"]
        self.decode_format = next(f for f in _DECODE_PREFERENCE if f in self.stored)
        layers = range(self.spec.num_layers)
        self.scales = torch.stack([artifact.tensor(f"layers.{i}.activation_scale") for i in layers])

    def decode(self, weight_format: str, cache: KVCacheSpec) -> NamedPath:
        """Every token decoded."""
        path = StreamedPath(
            spec=self.spec, protocol="decode", numerics=EXACT, kv_cache=cache,
            decode=lambda index: self.loader.layer(index, weight_format),
        )  # fmt: skip
        return NamedPath(f"{FORMAT_NAMES[weight_format]} weights", path, _cache_name(cache))

    def eight_bit(self, protocol: str) -> NamedPath:
        """E4M3 prefill of everything, or as a server would."""
        served = protocol == "serve"
        path = StreamedPath(
            spec=self.spec, protocol=protocol, numerics=EXACT, kv_cache=self.cache if served else _BF16_CACHE,
            prefill=lambda index: self.loader.layer(index, "e4m3"),
            decode=(lambda index: self.loader.layer(index, self.decode_format)) if served else None,
            initial_scale=self.scales,
        )  # fmt: skip
        if not served:
            return NamedPath("E4M3 weights and activations", path, "")
        return NamedPath(f"E4M3 prefill, {FORMAT_NAMES[self.decode_format]} decode", path, _cache_name(self.cache))

    def sixteen_bit_serve(self, prefill_format: str) -> NamedPath:
        """As a server would, with 16-bit activations in prefill."""
        path = StreamedPath(
            spec=self.spec, protocol="serve", numerics=EXACT, kv_cache=self.cache,
            prefill=lambda index: self.loader.layer(index, prefill_format),
            decode=lambda index: self.loader.layer(index, self.decode_format),
        )  # fmt: skip
        weights = "" if prefill_format == "bf16" else f" ({FORMAT_NAMES[prefill_format]} weights)"
        name = f"BF16 prefill{weights}, {FORMAT_NAMES[self.decode_format]} decode"
        return NamedPath(name, path, _cache_name(self.cache))


def _cache_name(cache: KVCacheSpec) -> str:
    return "INT4" if cache.bits == 4 else "BF16"
