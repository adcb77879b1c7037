"""The config.json of an exported checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fut_runtime.artifact.json_text import canonical, parse_object
from fut_runtime.artifact.reader import Artifact
from fut_runtime.artifact.spec import ModelSpec

_TORCH_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def exported_config(artifact: Artifact, dtype: str) -> str:
    """config.json: the source's own where the artifact has it, else made from the manifest.

    The source's is changed in three places: the storage type, no quantization, and whether the head is the embedding
    (an artifact may hold a separate quantised head for a model that ties them).

    Args:
        artifact: the artifact exported.
        dtype: `bf16`, `f16` or `f32`.

    Raises:
        ArtifactError: the artifact's config.json is not JSON.
    """
    model = artifact.manifest.model
    if "config.json" in artifact.manifest.side_files:
        path = artifact.side_file("config.json")
        config = parse_object(path.read_bytes(), str(path))
    else:
        config = config_of(model)
    config.pop("quantization_config", None)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = _TORCH_NAMES[dtype]
    if not {"dtype", "torch_dtype"} & set(config):
        config["torch_dtype"] = _TORCH_NAMES[dtype]
    config["tie_word_embeddings"] = "head" not in artifact.manifest.weights
    return canonical(config)


def config_of(model: ModelSpec) -> dict[str, Any]:
    """A config.json with everything that the manifest knows, in the style that transformers 4 and 5 both read."""
    config: dict[str, Any] = {
        "architectures": [model.architecture],
        "model_type": model.architecture.removesuffix("ForCausalLM").lower(),
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope.theta,
        "attention_bias": model.o_bias,
        "bos_token_id": model.bos_token_id,
        "pad_token_id": model.pad_token_id,
        "eos_token_id": list(model.eos_token_ids) if len(model.eos_token_ids) != 1 else model.eos_token_ids[0],
        "sliding_window": None,
    }
    if model.rope.type != "default":
        scaling = {key: value for key, value in asdict(model.rope).items() if value is not None}
        scaling["rope_type"] = scaling.pop("type")
        del scaling["theta"]
        if model.rope.type != "yarn":
            del scaling["truncate"]
        config["rope_scaling"] = scaling
    return config
