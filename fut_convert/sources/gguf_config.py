"""GGUF metadata -> the config.json and generation_config.json that the model had, or could have had.

They go through the same reader as any other checkpoint's, and into the artifact as its side files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fut_convert.errors import CheckpointError, UnsupportedModelError
from fut_convert.sources.gguf_file import shortest_decimal
from fut_convert.sources.gguf_rope import rope_scaling

#: `general.architecture` -> architecture and model_type of transformers. Mistral's files say `llama`.
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

#: What llama.cpp assumes of a SentencePiece vocabulary that does not say.
_SENTENCEPIECE_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

#: Tokens that end a turn. One that the chat template writes ends a text even if the file names another one.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


def hugging_face_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] | None,
    where: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json of a GGUF model.

    Args:
        metadata: of the file.
        shapes: shape of every tensor by its Hugging Face name: they decide vocabulary size, tying and biases.
        rope_factors: `rope_freqs.weight`, if the file has it.
        where: file name, for messages.

    Raises:
        UnsupportedModelError: an architecture or a setting that cannot be converted.
        CheckpointError: a key is missing or has a senseless value.
    """
    arch = _architecture(metadata, where)
    _refuse_unsupported(metadata, arch, where)
    name, model_type = ARCHITECTURES[arch]
    hidden = _size(metadata, f"{arch}.embedding_length", where)
    heads = _size(metadata, f"{arch}.attention.head_count", where)
    kv_heads = _size(metadata, f"{arch}.attention.head_count_kv", where, heads)
    head_dim = _size(metadata, f"{arch}.attention.key_length", where, hidden // heads)
    if _size(metadata, f"{arch}.attention.value_length", where, head_dim) != head_dim:
        raise UnsupportedModelError(f"{where}: K and V heads of different sizes are not supported")
    rotated = _size(metadata, f"{arch}.rope.dimension_count", where, head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{where}: only {rotated} of {head_dim} channels of a head are rotated: not supported"
        )
    theta = shortest_decimal(float(metadata.get(f"{arch}.rope.freq_base", 10000.0)))
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(f"{where}: token_embd.weight is missing; the file is incomplete")
    ids = special_token_ids(metadata)
    eos = _end_ids(metadata, ids)
    config = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _size(metadata, f"{arch}.feed_forward_length", where),
        "num_hidden_layers": _size(metadata, f"{arch}.block_count", where),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": embedding[0],
        "max_position_embeddings": _size(metadata, f"{arch}.context_length", where),
        "rms_norm_eps": _epsilon(metadata, f"{arch}.attention.layer_norm_rms_epsilon", where),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(metadata, arch, theta, head_dim, rope_factors, where),
        "attention_bias": arch != "qwen2" and "model.layers.0.self_attn.q_proj.bias" in shapes,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "bos_token_id": ids.get("bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": ids.get("padding_token_id"),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if arch != "llama":
        config |= {"use_sliding_window": False, "sliding_window": None}
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return config, {key: value for key, value in generation.items() if value is not None}


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """`bos_token_id`, `eos_token_id`, `eot_token_id`, `padding_token_id`, …: those that lie in the vocabulary."""
    count = len(metadata.get("tokenizer.ggml.tokens", ()))
    names = ("bos", "eos", "eot", "eom", "unknown", "padding")
    defaults = _SENTENCEPIECE_IDS if metadata.get("tokenizer.ggml.model") == "llama" else {}
    ids = {}
    for key in (f"{name}_token_id" for name in names):
        value = metadata.get(f"tokenizer.ggml.{key}", defaults.get(key))
        if value is not None and 0 <= value < count:
            ids[key] = int(value)
    return ids


def _architecture(metadata: Mapping[str, Any], where: str) -> str:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{where}: holds a GGUF {kind!r}, not a model")
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return str(arch)


def _refuse_unsupported(metadata: Mapping[str, Any], arch: str, where: str) -> None:
    context = metadata.get(f"{arch}.context_length", 0)
    window = metadata.get(f"{arch}.attention.sliding_window", 0)
    if isinstance(window, int) and 0 < window < context:
        raise UnsupportedModelError(f"{where}: a sliding window of {window} tokens is not supported")
    for key, what in (
        ("expert_count", "mixtures of experts"),
        ("attention.clamp_kqv", "clamped q, k and v"),
        ("attention.max_alibi_bias", "ALiBi positions"),
        ("attention.scale", "attention scales other than 1 / sqrt(head_dim)"),
        ("logit_scale", "logit scales"),
        ("residual_scale", "residual scales"),
        ("embedding_scale", "embedding scales"),
    ):
        if metadata.get(f"{arch}.{key}"):
            raise UnsupportedModelError(
                f"{where}: {arch}.{key} is {metadata[f'{arch}.{key}']}: {what} are not supported"
            )


def _size(metadata: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if value is None:
        raise CheckpointError(f"{where}: {key} is missing from the metadata")
    if isinstance(value, list):
        # Some converters write one value a layer even when they are all the same.
        if len(set(value)) != 1:
            raise UnsupportedModelError(f"{where}: {key} differs by layer, which is not supported")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}: {key} is {value!r}, expected a positive integer")
    return value


def _epsilon(metadata: Mapping[str, Any], key: str, where: str) -> float:
    value = metadata.get(key)
    if not isinstance(value, float) or value <= 0:
        raise CheckpointError(f"{where}: {key} is {value!r}, expected a positive number")
    return shortest_decimal(value)


def _end_ids(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[int]:
    ends = [ids[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in ids]
    template = metadata.get("tokenizer.chat_template", "")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ends += [tokens.index(token) for token in _TURN_ENDS if token in template and token in tokens]
    return list(dict.fromkeys(ends))
