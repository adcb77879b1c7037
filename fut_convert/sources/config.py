"""config.json and generation_config.json -> ModelSpec, refusing with a reason whatever cannot be converted.

A key that the config leaves out has the default of transformers' config class for that architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fut_convert.errors import CheckpointError, UnsupportedModelError
from fut_convert.sources.fields import Fields
from fut_convert.sources.quantized import quantization_method, refusal
from fut_convert.sources.rope import rope_spec
from fut_runtime.artifact.spec import ModelSpec

#: Sizes of one attention head that the kernels are built for.
HEAD_DIMS: tuple[int, ...] = (64, 80, 96, 128)
#: Query heads that may share one KV head.
MAX_GQA_RATIO = 16


@dataclass(frozen=True)
class Architecture:
    """What transformers' config class of an architecture defaults to, and what its model class always has.

    `num_kv_heads` and `head_dim` of None mean: as many as heads, and hidden_size / heads. `sliding_window` is the
    window a config without the key has; `sliding_by_flag` that only `use_sliding_window` turns it on.
    `qkv_bias` is fixed by the model class, or None where `attention_bias` decides (for all four projections).
    """

    model_type: str
    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    sliding_by_flag: bool = False
    qkv_bias: bool | None = None
    qk_norm: bool = False


#: More layers than any model has.
_MOST_LAYERS = 10_000

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", 2048, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": Architecture(
        "mistral", 131072, num_kv_heads=8, bos_token_id=1, eos_token_id=2, sliding_window=4096, qkv_bias=False
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", 32768, num_kv_heads=32, sliding_window=4096, sliding_by_flag=True, qkv_bias=True
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", 32768, num_kv_heads=32, head_dim=128, sliding_window=4096, sliding_by_flag=True, qk_norm=True
    ),
}

#: Keys that mean several feed-forward networks to choose from.
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def model_spec(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, where: str) -> ModelSpec:
    """The model that a config.json describes. `where` names its file or repository in messages.

    Raises:
        UnsupportedModelError: the model cannot be converted; the message says why and what could be.
        CheckpointError: a key is missing, has a senseless value, or contradicts another.
    """
    fields = Fields(config, f"{where}: config.json")
    name = _architecture(fields)
    defaults = ARCHITECTURES[name]
    max_positions = fields.optional_int("max_position_embeddings") or defaults.max_position_embeddings
    _refuse_unsupported(fields, name, max_positions)

    hidden, heads = fields.required_int("hidden_size"), fields.required_int("num_attention_heads")
    kv_heads = fields.optional_int("num_key_value_heads")
    if kv_heads is None:
        # An explicit null means multi-head attention; an absent key the class's default.
        kv_heads = heads if "num_key_value_heads" in config else defaults.num_kv_heads or heads
    vocab = fields.required_int("vocab_size")
    head_dim = _head_dim(fields, defaults, hidden, heads)
    _check_heads(fields, heads, kv_heads)
    generation = Fields(generation_config or {}, f"{where}: generation_config.json")
    attention_bias = fields.boolean("attention_bias", False)
    return ModelSpec(
        architecture=name,
        hidden_size=hidden,
        intermediate_size=fields.required_int("intermediate_size"),
        num_layers=_num_layers(fields),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        rms_norm_eps=fields.optional_float("rms_norm_eps") or defaults.rms_norm_eps,
        max_position_embeddings=max_positions,
        rope=rope_spec(fields, max_positions),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", defaults.tie_word_embeddings),
        qkv_bias=attention_bias if defaults.qkv_bias is None else defaults.qkv_bias,
        o_bias=attention_bias and defaults.qkv_bias is None,
        qk_norm=defaults.qk_norm,
        bos_token_id=_first_id(generation, fields, "bos_token_id", defaults.bos_token_id, vocab),
        eos_token_ids=_eos_ids(generation, fields, defaults, vocab),
        pad_token_id=_first_id(generation, fields, "pad_token_id", None, vocab),
    )


def _architecture(fields: Fields) -> str:
    config, where = fields.data, fields.where
    supported = ", ".join(ARCHITECTURES)
    model_type = config.get("model_type")
    names = config.get("architectures") or [n for n, a in ARCHITECTURES.items() if a.model_type == model_type]
    if not isinstance(names, list) or not names:
        raise UnsupportedModelError(
            f"{where}: neither architectures nor model_type ({model_type!r}) names a supported model; "
            f"supported are {supported}"
        )
    name = str(names[0])
    if name not in ARCHITECTURES:
        reason = ""
        if any(key in fields for key in _EXPERT_KEYS):
            reason = " (a mixture of experts)"
        elif "vision_config" in fields or "text_config" in fields:
            reason = " (a multimodal model)"
        elif "auto_map" in fields:
            reason = " (its code comes with the checkpoint, and such code is never executed)"
        raise UnsupportedModelError(f"{where}: architecture {name}{reason} is not supported; supported are {supported}")
    expected = ARCHITECTURES[name].model_type
    if model_type is not None and model_type != expected:
        raise UnsupportedModelError(
            f"{where}: model_type is {model_type!r} but architectures says {name}, whose model_type is {expected!r}; "
            "which of the two the weights follow cannot be told"
        )
    return name


def _refuse_unsupported(fields: Fields, name: str, max_positions: int) -> None:
    config, where = fields.data, fields.where
    section = fields.section("quantization_config")
    if section is not None:
        raise UnsupportedModelError(refusal(where, quantization_method(section.data)))
    for key in _EXPERT_KEYS:
        if key in fields:
            raise UnsupportedModelError(f"{where}: {key} is {config[key]!r}; mixtures of experts are not supported")
    for key in ("vision_config", "text_config"):
        if key in fields:
            raise UnsupportedModelError(
                f"{where}: {key} is set; multimodal models are not supported, only plain text ones"
            )
    if fields.boolean("mlp_bias", False):
        raise UnsupportedModelError(f"{where}: mlp_bias is true; biases in the feed-forward network are not supported")
    if ARCHITECTURES[name].qkv_bias is False and fields.boolean("attention_bias", False):
        raise CheckpointError(f"{where}: attention_bias is true, but {name} has no attention biases")
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{where}: hidden_act is {activation!r}; only silu is supported")
    _refuse_sliding_window(fields, name, max_positions)


def _num_layers(fields: Fields) -> int:
    count = fields.required_int("num_hidden_layers")
    if count > _MOST_LAYERS:  # every layer is looked for by name
        raise fields.error("num_hidden_layers", f"a positive integer, at most {_MOST_LAYERS}")
    return count


def _refuse_sliding_window(fields: Fields, name: str, max_positions: int) -> None:
    """Sliding windows are refused unless they cannot be noticed: never turned on, or longer than any text."""
    config, where, defaults = fields.data, fields.where, ARCHITECTURES[name]
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise fields.error("layer_types", "a list with the kind of every layer")
    other = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if other:
        raise UnsupportedModelError(f"{where}: layer_types holds {other}; only full_attention is supported")
    if defaults.sliding_by_flag:
        if not fields.boolean("use_sliding_window", False) or kinds:
            return
        # Layers below max_window_layers attend to everything even when the flag is set.
        if (fields.optional_int("max_window_layers") or 28) >= fields.required_int("num_hidden_layers"):
            return
    window = fields.optional_int("sliding_window")
    source = "is"
    if "sliding_window" not in config and defaults.sliding_window is not None:
        window, source = defaults.sliding_window, f"is absent, which in {name} means"
    if window is not None and window < max_positions:
        raise UnsupportedModelError(
            f"{where}: sliding_window {source} {window}, less than max_position_embeddings {max_positions}; sliding "
            "windows are not supported (if the model attends to everything, set sliding_window to null)"
        )


def _head_dim(fields: Fields, defaults: Architecture, hidden: int, heads: int) -> int:
    head_dim = fields.optional_int("head_dim")
    if head_dim is None:
        # As for num_key_value_heads, an explicit null is not the class's default but the quotient.
        head_dim = None if "head_dim" in fields.data else defaults.head_dim
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(
                f"{fields.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
                "and there is no head_dim"
            )
        head_dim = hidden // heads
    if head_dim not in HEAD_DIMS:
        raise UnsupportedModelError(
            f"{fields.where}: heads of {head_dim} channels are not supported; supported are "
            f"{', '.join(map(str, HEAD_DIMS))} (head_dim, or hidden_size / num_attention_heads)"
        )
    return head_dim


def _check_heads(fields: Fields, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if heads // kv_heads > MAX_GQA_RATIO:
        raise UnsupportedModelError(
            f"{fields.where}: {heads} heads share {kv_heads} KV heads, {heads // kv_heads} to one; "
            f"at most {MAX_GQA_RATIO} are supported"
        )


def _first_id(generation: Fields, config: Fields, key: str, default: int | None, vocab: int) -> int | None:
    for fields in (generation, config):
        ids = fields.token_ids(key, vocab)
        if ids:
            return ids[0]
    return default if key not in config.data and default is not None and default < vocab else None


def _eos_ids(generation: Fields, config: Fields, defaults: Architecture, vocab: int) -> tuple[int, ...]:
    """Every id that ends a text: those of generation_config.json first, then those of config.json.

    Chat models often name the end of a turn in only one of the two.
    """
    ids = generation.token_ids("eos_token_id", vocab) + config.token_ids("eos_token_id", vocab)
    if not ids and "eos_token_id" not in config.data and defaults.eos_token_id is not None:
        ids = (defaults.eos_token_id,)
    return tuple(dict.fromkeys(ids))
