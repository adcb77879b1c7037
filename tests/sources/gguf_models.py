"""Small GGUF models written with the gguf package, the way llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, models, normalizers, trainers

from fut_convert.sources.gguf_tokenizer import tokenizer_files
from synthetic_checkpoint import CHAT_TEMPLATE, CheckpointShape, random_tensor, tokenizer_json

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}

CORPUS = (
    "the quick brown fox jumps over the lazy dog, and the other foxes, browner still, jumped over others; "
    "there they were, the thinnest of things, thinking this through: whether weather withers the heather."
)

Tensors = dict[str, np.ndarray[Any, Any]]


def gguf_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def float_tensors(shape: CheckpointShape) -> Tensors:
    """The model's weights under Hugging Face names, float32, in a Hugging Face model's row order."""
    return {name: random_tensor(name, size, shape).numpy() for name, size in shape.tensor_shapes().items()}


def reorder_rows(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k of Llama models: the halves of each head interleaved, row by row."""
    head_dim = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = rows[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = rows[head * head_dim + head_dim // 2 + i]
    return out


def stored_tensors(shape: CheckpointShape) -> Tensors:
    """The same under GGUF names and in the row order of GGUF files."""
    stored = {}
    for name, values in float_tensors(shape).items():
        heads = shape.heads if ".q_proj." in name else shape.kv_heads if ".k_proj." in name else 0
        reordered = shape.family == "llama" and heads
        stored[gguf_name(name)] = reorder_rows(values, heads) if reordered else values
    return stored


def byte_level_metadata(vocab_size: int = 384, pre: str = "gpt-2") -> dict[str, Any]:
    """A GPT-2 style tokenizer with three special tokens."""
    model = json.loads(tokenizer_json(vocab_size))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (vocab_size - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


CORPUS = (
    "the quick brown fox jumps over the lazy dog, and the other foxes, browner still, jumped over others; "
    "there they were, the thinnest of things, thinking this through: whether weather withers the heather."
)


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Llama 2's layout: three specials, 256 bytes, merged pieces by falling score, then single characters."""
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator([f"▁{CORPUS}"], trainer)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    merged = [piece for piece in pieces if len(piece) > 1]
    characters = [piece for piece in pieces if len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *characters]
    count = len(merged) + len(characters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(count)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * count,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def rebuild(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer our reader makes of this metadata, and its tokenizer_config.json."""
    files = tokenizer_files(metadata, 2048, "some.gguf")
    return Tokenizer.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"])


def model_metadata(shape: CheckpointShape) -> dict[str, Any]:
    """Everything but the tokenizer."""
    arch = shape.family
    return {
        f"{arch}.block_count": shape.layers,
        f"{arch}.context_length": shape.max_positions,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.feed_forward_length": shape.intermediate,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(np.float32(shape.rms_norm_eps)),
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.rope.dimension_count": shape.head_dim,
    }


def write_gguf(
    path: Path,
    shape: CheckpointShape,
    *,
    matrix_type: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    change: Callable[[Tensors], None] | None = None,
) -> Path:
    """Write a model.

    Args:
        matrix_type: of the matrices; vectors are F32. K- and IQ-quants get random blocks: the package makes none.
        metadata: keys to add or replace; a value of `...` leaves the key out.
        change: edits the tensors, under GGUF names, before they are written.
    """
    values = {**model_metadata(shape), **byte_level_metadata(shape.vocab_size), **(metadata or {})}
    tensors = stored_tensors(shape)
    if change is not None:
        change(tensors)
    writer = GGUFWriter(path, values.pop("general.architecture", shape.family))
    for key, value in values.items():
        if value is not ...:
            _add_value(writer, key, value)
    kind = GGMLQuantizationType[matrix_type]
    random = np.random.default_rng(shape.seed)
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
        elif matrix_type.endswith("_K") or matrix_type.startswith("IQ"):
            writer.add_tensor(name, _random_blocks(random, tensor.shape, kind), raw_dtype=kind)
        elif matrix_type in ("F32", "F16"):
            writer.add_tensor(name, tensor.astype(np.float32 if matrix_type == "F32" else np.float16))
        else:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_blocks(
    random: np.random.Generator, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> np.ndarray[Any, Any]:
    block, size = GGML_QUANT_SIZES[kind]
    # Bytes below 0x40 keep every half-precision scale among them finite.
    return random.integers(0, 0x40, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if key == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
