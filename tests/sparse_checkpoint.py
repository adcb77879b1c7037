"""A checkpoint of 405 billion weights that takes next to no disk: headers, and holes where the weights would be."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16384, 53248, 126, 128, 8, 128, 128256
SHARD_BYTES = 4_700_000_000


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write_sparse_checkpoint(directory: Path) -> int:
    """Headers and holes; returns the number of shards."""
    directory.mkdir()
    shards: list[dict[str, object]] = [{}]
    ends = [0]
    for name, shape in tensors():
        size = 2 * math.prod(shape)
        if shards[-1] and ends[-1] + size > SHARD_BYTES:
            shards.append({})
            ends.append(0)
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [ends[-1], ends[-1] + size]}
        ends[-1] += size
    where = {}
    for number, (header, end) in enumerate(zip(shards, ends, strict=True), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
        where |= dict.fromkeys(header, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return len(shards)
