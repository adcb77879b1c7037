"""Models to measure without their weights: sizes of published Llama models, and how an artifact would store them."""

from __future__ import annotations

from dataclasses import replace

from fut_runtime.artifact.fragment import DEFAULT_NIBBLE_ORDER, DEFAULT_SCALE_ORDER
from fut_runtime.artifact.layout import default_group_size, padded_e4m3_shape, padded_int4_shape
from fut_runtime.artifact.manifest import ActivationSpec, KVCacheSpec, Manifest, WeightSpec
from fut_runtime.artifact.spec import MODULES, ModelSpec, RopeSpec

_LLAMA = ModelSpec(
    architecture="LlamaForCausalLM",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    rope=RopeSpec(
        type="llama3",
        theta=500000.0,
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    tie_word_embeddings=False,
)
#: Llama-3.2-1B, Llama-3.1-8B, Llama-3.1-70B and Llama-3.1-405B.
SHAPES: dict[str, ModelSpec] = {
    "1b": replace(
        _LLAMA,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        rope=replace(_LLAMA.rope, factor=32.0),
    ),
    "8b": _LLAMA,
    "70b": replace(_LLAMA, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
    "405b": replace(_LLAMA, hidden_size=16384, intermediate_size=53248, num_layers=126, num_heads=128),
}
#: Format of the head: what conversion for speed stores, whatever the layers are in.
HEAD_FORMAT = "e4m3"
_AFTER_NORM = ("qkv", "gate_up", "head")


def manifest_of(model: ModelSpec, weight_format: str, kv_cache: KVCacheSpec) -> Manifest:
    """Manifest of an artifact that stores every layer in one format, `int4`, `e4m3` or `bf16`, as conversion would."""
    weights = {
        f"layers.{i}.{module}": {weight_format: _weight_spec(model, module, weight_format)}
        for i in range(model.num_layers)
        for module in MODULES
    }
    weights["head"] = {HEAD_FORMAT: _weight_spec(model, "head", HEAD_FORMAT)}
    return Manifest(
        model=model,
        weights=weights,
        kv_cache=kv_cache,
        activation=ActivationSpec(calibrated=False, margin=1.0),
        head=HEAD_FORMAT,
        source={"kind": "random"},
        recipe={},
        tools={},
    )


def with_layers(manifest: Manifest, layers: int) -> Manifest:
    """The first layers of a model, as a model of their own."""
    return replace(manifest, model=replace(manifest.model, num_layers=layers))


def _weight_spec(model: ModelSpec, module: str, weight_format: str) -> WeightSpec:
    shape = model.module_shape(module)
    paired = module == "gate_up"
    after_norm = module in _AFTER_NORM
    if weight_format != "int4":
        e4m3 = weight_format == "e4m3"
        return WeightSpec(
            format=weight_format,
            shape=shape,
            padded_shape=padded_e4m3_shape(shape),
            row_order="interleave1" if paired else "natural",
            gain=("folded" if e4m3 else "runtime") if after_norm else "none",
            scale_dtype="float32" if e4m3 else None,
        )
    group_size = default_group_size(shape[1])
    return WeightSpec(
        format="int4",
        shape=shape,
        padded_shape=padded_int4_shape(shape, group_size, paired),
        row_order="interleave8" if paired else "natural",
        gain="runtime" if after_norm else "none",
        group_size=group_size,
        scale_dtype="bfloat16",
        nibble_order=DEFAULT_NIBBLE_ORDER,
        scale_order=DEFAULT_SCALE_ORDER,
    )
